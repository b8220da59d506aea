"""Reading files and finding them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pypdf
import pytest

from tamis.core.errors import DocumentUnreadable, InvalidInput
from tamis.corpus import SUFFIXES, find_files, read_file

EXAMPLES = Path(__file__).parents[2] / "examples" / "documents"


def blank_pdf(password: str = "") -> bytes:
    writer = pypdf.PdfWriter()
    writer.add_blank_page(200, 200)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_line_ends_and_byte_order_marks_are_unified(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert read_file(path).text == "one\ntwo\nthree"
    path.write_bytes("höhe\r\n".encode("utf-16"))
    assert read_file(path).text == "höhe\n"


def test_invalid_utf8_is_read_with_a_warning(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"The caf\xe9 opens at nine o'clock.")
    text = read_file(path)
    assert text.text == "The caf\ufffd opens at nine o'clock."
    assert len(text.warnings) == 1 and "1 places are not valid utf-8" in text.warnings[0]


def test_a_replacement_character_that_is_really_there_is_no_slip(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a \ufffd stands here", encoding="utf-8")
    assert read_file(path).warnings == ()


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.md", b" \n\t\n", "is empty"),
        ("binary.txt", b"\x7fELF\x00\x01", "is binary"),
        ("cyrillic.txt", "Маяк стоит на скале".encode("cp1251"), "not UTF-8"),
        ("scripts.html", b"<script>let x = 1</script>", "no text once its markup is removed"),
        ("scan.pdf", blank_pdf(), "1 pages and no text"),
        ("secret.pdf", blank_pdf("sesame"), "is encrypted"),
        ("broken.pdf", b"%PDF-1.7 and then nothing", "cannot be read as a PDF"),
        ("fake.pdf", b"just text", "cannot be read as a PDF"),
        ("data.csv", b"a,b", "Tamis reads .txt, .md"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, name, data, reason):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DocumentUnreadable, match=reason) as caught:
        read_file(path)
    assert name in str(caught.value)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be opened"):
        read_file(tmp_path / "gone.txt")


def test_html_loses_scripts_and_keeps_lines():
    text = read_file(EXAMPLES / "boat-timetable.html")
    raw = (EXAMPLES / "boat-timetable.html").read_text(encoding="utf-8").split("\n")
    assert text.title == "Supply boat timetable"
    assert "Contact" not in text.text and "addEventListener" not in text.text and "border" not in text.text
    assert "April to September | 08:30 | 09:50 | 15:00" in text.text
    for line, number in zip(text.text.split("\n"), text.numbers, strict=True):
        if line:
            assert line.lstrip("#- ").split()[0] in raw[number - 1]


def test_html_in_a_named_encoding_and_with_loose_tags(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes('<meta charset="iso-8859-1"><p>Höhe<br>zwei<div>drei <b>vier</b><p>fünf'.encode("latin-1"))
    assert read_file(path).text.split("\n") == ["Höhe", "zwei", "", "drei vier", "", "fünf"]
    path.write_bytes('<meta charset="klingon"><p>Höhe'.encode())
    assert read_file(path).text == "Höhe"


def test_pdf_lines_carry_page_numbers():
    text = read_file(EXAMPLES / "spare-parts.pdf")
    assert text.title == "Spare parts and stores"
    page = dict(zip(text.text.split("\n"), text.numbers, strict=True))
    assert page["Fog signal"] == 1 and page["Generators"] == 2


def test_a_folder_is_walked_in_order_without_hidden_ones_and_loops(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "note.md").write_text("x")
    (folder / "kb.tamis").mkdir()
    (folder / "kb.tamis" / "note.md").write_text("x")
    (folder / "data.csv").write_text("x")
    (folder / "Makefile").write_text("x")
    os.symlink(folder, folder / "deep" / "loop")
    found = find_files([folder])
    assert [p.relative_to(folder).as_posix() for p in found.files] == ["boat.txt", "lamp.md", "deep/bird.md"]
    assert found.ignored == {"(none)": 1, ".csv": 1}


def test_globs_and_repeats(folder):
    found = find_files([f"{folder}/**/*.md", folder / "lamp.md", folder])
    assert [p.name for p in found.files] == ["bird.md", "lamp.md", "boat.txt"]


def test_a_name_with_glob_characters_is_found(tmp_path):
    (tmp_path / "notes[1].md").write_text("x")
    assert [p.name for p in find_files([tmp_path / "notes[1].md"]).files] == ["notes[1].md"]


@pytest.mark.parametrize("name", ["nowhere", "nowhere/*.md"])
def test_a_missing_path_is_refused(tmp_path, name):
    with pytest.raises(InvalidInput, match="nowhere"):
        find_files([tmp_path / name])


def test_suffixes_are_case_blind(tmp_path):
    (tmp_path / "A.MD").write_text("# Big\n\nx")
    assert read_file(tmp_path / "A.MD").markup == "markdown"
    assert ".pdf" in SUFFIXES
