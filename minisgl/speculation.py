"""API speculation: one call to a hosted model fills several fields (SGLang paper, section 3.4).

    s += "Name:" + gen("name", stop="\\n") + "\\nJob:" + gen("job", stop="\\n")

The first gen asks for more tokens than it needs, and without its stop string; whatever the model wrote past the stop
is kept.  A constant text that comes next is compared with what was kept, and a gen that follows is cut out of it:

    answer   " Ada Lovelace\\nJob: mathematician\\n..."
              '- name ----' '-----' '- job ------'
                         constant: matches, goes on

The first mismatch, or a gen whose end is not in the answer, throws the rest away and the next gen is a call of its own.
"""

from __future__ import annotations

from collections.abc import Sequence


class Speculation:
    """What a call answered beyond what was asked.  tokens: how many more a call asks for."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.rest = ""
        self._complete = False  # the model ended the answer itself

    def fill(self, answer: str, complete: bool) -> None:
        self.rest, self._complete = answer, complete

    def drop(self) -> None:
        self.rest, self._complete = "", False

    def constant(self, text: str) -> None:
        """The program appended this text: go past it, or give up the rest."""
        if self.rest.startswith(text):
            self.rest = self.rest[len(text) :]
        else:
            self.drop()

    def cut(self, stop: Sequence[str]) -> str | None:
        """The output of a gen with these stop strings, or None if it cannot be told from the rest."""
        if not self.rest:
            return None
        ends = [at for text in stop if (at := self.rest.find(text)) >= 0]
        if not ends and not self._complete:
            self.drop()
            return None
        end = min(ends, default=len(self.rest))
        output, self.rest = self.rest[:end], self.rest[end:]
        return output

    def skip_opening(self, partial: str) -> None:
        """A chat model answers from the message's beginning: find the text that the program had put there already.

        Raises RuntimeError if the answer does not have it.
        """
        at = self.rest.find(partial)
        if at < 0:  # models drop or add white space at the edges of a turn
            partial = partial.strip()
            at = self.rest.find(partial)
        if at < 0:
            raise RuntimeError(
                f"the model's answer has not the text {partial!r} that the program wrote before the gen; "
                f"it begins with {self.rest[:80]!r}"
            )
        self.rest = self.rest[at + len(partial) :]
