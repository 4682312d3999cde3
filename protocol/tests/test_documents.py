"""The checked-in documents say what the models say."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
GENERATOR = ROOT / "docs" / "generate.py"


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


@pytest.mark.parametrize("path", generate.DOCUMENTS, ids=lambda path: path.name)
def test_a_document_is_not_stale(path: Path) -> None:
    text = path.read_text()
    assert generate.rendered(text) == text, "run: python docs/generate.py"


def test_every_generated_part_is_in_a_document() -> None:
    text = "".join(path.read_text() for path in generate.DOCUMENTS)
    assert set(re.findall(r"<!-- begin ([\w ]+):", text)) == set(generate.PARTS)


def test_a_stale_part_is_written_anew_and_the_prose_around_it_is_kept() -> None:
    stale = "before\n<!-- begin error codes: x -->\n| old |\n<!-- end error codes -->\nafter\n"
    fresh = generate.rendered(stale)
    assert fresh.startswith("before\n<!-- begin error codes: x -->\n\n| code | meaning |")
    assert fresh.endswith("<!-- end error codes -->\nafter\n")
    assert "old" not in fresh
    assert generate.rendered(fresh) == fresh


def test_the_check_fails_on_a_stale_document_and_writing_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["generate.py", *options])
        return generate.main(), capsys.readouterr().out

    copies = tuple(tmp_path / path.name for path in generate.DOCUMENTS)
    for copy, path in zip(copies, generate.DOCUMENTS, strict=True):
        copy.write_text(path.read_text())
    monkeypatch.setattr(generate, "DOCUMENTS", copies)
    assert run("--check") == (0, "")
    wire = copies[0]
    wire.write_text(wire.read_text().replace("| `uri` |", "| `url` |"))
    assert run("--check") == (1, "wire.md is stale\n")
    assert "| `url` |" in wire.read_text()
    assert run() == (0, "wire.md written\n")
    assert "| `url` |" not in wire.read_text()
    assert run("--check") == (0, "")


@pytest.mark.parametrize("path", generate.DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", path.read_text()):
        assert (path.parent / target).exists()


def test_the_columns_are_told_as_the_models_pack_them() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| (\w+) \|$", generate.PARTS["columns"](), re.MULTILINE)
    assert rows == [
        ("object_sizes", "unsigned, 64 bits", "object"),
        ("generations", "unsigned, 64 bits", "object"),
        ("sync_statuses", "unsigned, 8 bits", "object"),
        ("chunk_counts", "unsigned, 32 bits", "object"),
        ("checksummed", "bit", "object"),
        ("paths", "string", "path"),
        ("path_tiers", "unsigned, 8 bits", "path"),
        ("chunk_paths", "unsigned, 32 bits", "chunk"),
        ("chunk_offsets", "unsigned, 64 bits", "chunk"),
        ("chunk_lengths", "unsigned, 32 bits", "chunk"),
        ("chunk_checksums", "unsigned, 32 bits", "chunk"),
    ]


@pytest.mark.parametrize("path", generate.DOCUMENTS, ids=lambda path: path.name)
def test_links_within_a_document_lead_to_a_heading(path: Path) -> None:
    text = path.read_text()
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= headings


@pytest.mark.parametrize("package", ["protocol", "daemon_ext", "connector", "compat_tests"])
def test_the_architecture_says_of_every_module_what_it_is_for(package: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition(f"in `{package}/…/`:")[2].partition("\n\nThe ")[0]
    (source,) = (ROOT / package / "src").glob("hypercache_*")
    modules = [path.relative_to(source) for path in source.rglob("[!_]*.py")]
    assert len(modules) > 15
    named = (path for path in modules if f"`{path}`" in section or f"`{path.parent}/`" in section)
    assert sorted(set(modules) - set(named)) == []
