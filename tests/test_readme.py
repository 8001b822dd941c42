"""What the README shows is run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_every_snippet_runs(snippet, capsys):
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "next_token_probs" in snippet:
        loss, token = printed.split()
        assert float(loss) < 0.1
        assert token == "4"
    else:
        assert "ok" in printed
        assert "WRONG" not in printed


def test_every_link_leads_to_a_file():
    links = [link for link in re.findall(r"\]\(([^)]*)\)", README) if not link.startswith("https:")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_lines_it_quotes_are_in_the_code():
    (quoted,) = re.findall(r"^```\n(dx .*?)\n```$", README, re.MULTILINE | re.DOTALL)
    code = (ROOT / "numpygpt/layers/norm.py").read_text(encoding="utf-8")
    assert "".join(f"        {line}\n" for line in quoted.splitlines()) in code
