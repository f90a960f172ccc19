"""Jump-forward changes no text; see `grammar_parity` for the full run."""

from __future__ import annotations

import pytest

from . import grammar_parity


def test_a_few_grammars(default_model_folder):
    chosen = [grammar for i, grammar in enumerate(grammar_parity.grammars()) if i in (32, 34, 45)]
    findings = grammar_parity.run(default_model_folder, chosen, limit=30)
    assert findings.wrong == [] and findings.forced > 5 and findings.steps[True] < findings.steps[False]
    assert findings.logprobs > 0 and findings.finished > 0


@pytest.mark.slow
def test_40_schemas_and_20_regexes(default_model_folder):
    chosen = grammar_parity.grammars()
    assert [kind for kind, _ in chosen].count("json_schema") == 40 and len(chosen) == 60
    findings = grammar_parity.run(default_model_folder, chosen)
    print(findings)
    assert findings.wrong == [] and findings.forced > 200 and findings.finished > 30
