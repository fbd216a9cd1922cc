"""The pictures in the docs show what the program does. Their bytes may differ: the memory is a prediction."""

import re
from xml.etree import ElementTree

import pytest

from docs.site import pictures

PAGES = "\n".join(page.read_text(encoding="utf-8") for page in (pictures.ROOT / "docs").rglob("*.md"))
SMALL = {
    "memory": lambda: pictures.memory("llama_debug", 1, ("full",)),
    "timeline": lambda: pictures.Timeline.of("llama_debug"),
}  # the others take seconds


def words(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn_committed_and_shown(name):
    drawn = words(SMALL.get(name, pictures.PICTURES[name])().svg())
    committed = words((pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8"))
    if name not in SMALL:
        assert drawn == committed, "draw it again: .venv/bin/python -m docs.site.pictures"
    assert drawn and committed and f"pictures/{name}.svg)" in PAGES


def test_a_query_sees_its_own_document_up_to_itself():
    fills = re.findall(r'fill="(#\w+)" stroke', pictures.document_mask().svg())
    seen = [sum(fill != "#ffffff" for fill in fills[144 * panel : 144 * (panel + 1)]) for panel in range(3)]
    # 12 tokens; documents of 5, 3 and 4 tokens; at most 3 keys per query
    assert seen == [12 * 13 // 2, 5 * 6 // 2 + 3 * 4 // 2 + 4 * 5 // 2, 12 + 6 + 9]
