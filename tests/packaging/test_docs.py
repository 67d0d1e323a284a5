"""Every Python block of README and docs runs, and every relative link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)\)")


def blocks() -> list[pytest.param]:
    return [
        pytest.param(page, code, id=f"{page.name}-{i}")
        for page in PAGES
        for i, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize(("page", "code"), blocks())
def test_a_block_runs(page: Path, code: str) -> None:
    exec(compile(code, str(page), "exec"), {"__name__": "__docs__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_shows_how_to_use_it() -> None:
    assert len(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 2


def test_every_setting_and_error_has_its_line() -> None:
    from kvkernels import errors

    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name, item in vars(errors).items():
        if isinstance(item, type) and issubclass(item, errors.KvkError):
            assert f"`{name}`" in page
