"""The commands in a page's code blocks. Each block states how it is run, or why it is not run.

`sh` and `python` blocks hold programs that must exit with 0. `console` blocks show commands after
`$ ` and their output, where `...` matches anything. A comment before a block contains a mark that
says how the block is run (`MARK`). The mark `all need` applies to all blocks of the page that have
no mark.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from testing.paths import REPOSITORY

MARK = re.compile(r"<!-- (needs|run by|until|all need): (.+?) -->")
"""Comment that says how the next block is run. `needs: a cluster` means that no test runs the
block. `run by: tests/...` names the test that runs the block. `until: TEXT` starts the block in the
background, and waits until the block has printed TEXT. The block is interrupted at the end of the
page."""
SHELL, CONSOLE, PYTHON = "sh", "console", "python"
OTHER = ("text", "yaml", "dockerfile")
DOCUMENTS = sorted(
    [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
    + [*(REPOSITORY / "examples").glob("*/README.md"), REPOSITORY / "k8s" / "README.md"]
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A code block that shows commands."""

    page: Path
    line: int
    kind: str
    text: str
    needs: str | None = None
    run_by: str | None = None
    until: str | None = None

    @property
    def location(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def runs_here(self) -> bool:
        return self.needs is None and self.run_by is None

    @property
    def commands(self) -> list[str]:
        """Return the commands without comments.

        A Python program, a loop and a function count as one command each.
        """
        if self.kind == PYTHON:
            return [self.text]
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if self.kind == CONSOLE:
            return [line[2:] for line in lines if line.startswith("$ ")]
        return [
            line for line in lines if line and line[0] not in "# \t}" and line not in ("done", "fi")
        ]

    def steps(self) -> Iterator[tuple[str, str | None]]:
        """Return the script and the expected output of each step in the block.

        If the expected output is None, any output is accepted.
        """
        if self.kind != CONSOLE:
            yield self.text, None
            return
        for step in re.split(r"^\$ ", self.text, flags=re.M)[1:]:
            command, _, output = re.sub(r"\\\n\s*", "", step).partition("\n")
            yield command, output


def inline_code(page: Path) -> list[str]:
    """Return the inline code in the page's sentences and tables."""
    inlines = [
        token
        for token in MarkdownIt().enable("table").parse(page.read_text())
        if token.type == "inline"
    ]
    return [
        child.content
        for token in inlines
        for child in token.children or ()
        if child.type == "code_inline"
    ]


def blocks(page: Path) -> list[Block]:
    """Return the blocks of the page that contain commands, in order."""
    found, mark, default = [], {}, {}
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "html_block":
            for name, value in MARK.findall(token.content):
                if name == "all need":
                    default = {"needs": value}
                else:
                    mark[name.replace(" ", "_")] = value
        elif token.type in ("fence", "code_block"):
            location, kind = (
                f"{page.relative_to(REPOSITORY)}:{token.map[0] + 1}",
                token.info.strip(),
            )
            assert token.type == "fence", (
                f"{location}: indented, expected ```sh, ```console, ```python or ```text"
            )
            if kind in (SHELL, CONSOLE, PYTHON):
                made = mark or default
                found.append(
                    Block(page=page, line=token.map[0] + 1, kind=kind, text=token.content, **made)
                )
            else:
                assert kind in OTHER, (
                    f"{location}: is {kind or 'unnamed'}, expected one of {OTHER} or a command's"
                )
            mark = {}
        elif token.type in ("paragraph_open", "heading_open", "table_open"):
            mark = {}
    return found
