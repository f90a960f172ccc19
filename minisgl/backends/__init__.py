"""Where programs run: the in-process engine, a server, or a hosted model, behind one small protocol (`base`)."""
