"""The documentation site: `scripts/docs`, or `sphinx-build -c docs . build/docs`.

The source folder is the root of the project, so that pages link to the README,
the changelog and the examples by the paths a forge shows them under.

Formulas are MathML, written into the page while the site is built: browsers
show it by themselves, so that neither a script nor a network is needed.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.writers.html5 import HTML5Translator

project = "multistage"
author = "the multistage developers"
try:
    release = importlib.metadata.version("multistage-checkpointing")
except importlib.metadata.PackageNotFoundError:  # from a checkout that is not installed
    from multistage import __version__ as release
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["build", ".venv*", ".git", "**/.pytest_cache", "**/.hypothesis"]
default_role = "py:obj"  # `names` of docstrings lead to their definition, if it is here

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    name: name for name in ("Action", "Adjoint", "Answer", "Planner", "Schedule", "State", "States")
}
autosummary_generate = False
napoleon_google_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"multistage {version}"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"


def toctrees(index: str) -> str:
    """Return the toctrees that the lists of links under each heading of the map amount to."""
    trees = []
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        caption, _, body = section.partition("\n")
        links = re.findall(r"^- \[([^]]*)\]\(([^)#]+)\.(?:md|rst)\)", body, re.M)
        pages = [
            f"{title} </{page[3:] if page.startswith('../') else f'docs/{page}'}>"
            for title, page in links
        ]
        if pages:
            head = ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
            trees.append("\n".join([*head, *pages, "```"]))
    return "\n\n".join(trees)


def _add_toctrees(app: Sphinx, docname: str, source: list[str]) -> None:
    # The map is plain Markdown, for forges too; a page that it misses is an error of the build.
    if docname == root_doc:
        source[0] += f"\n\n{toctrees(source[0])}\n"


def _one_by_one(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Give each of several attributes an entry of its own, which napoleon does not."""
    text = "\n".join(lines)
    several = r"^(\w+(?:, \w+)+)( : .*\n(?:[ ]+\S.*\n?)*)"
    head, rule, tail = text.partition("Attributes\n----------\n")
    if rule:
        section, more, rest = tail.partition("\n\n")
        section = re.sub(
            several,
            lambda m: "".join(f"{each}{m[2].rstrip()}\n" for each in m[1].split(", ")),
            section + "\n",
            flags=re.M,
        )
        lines[:] = (head + rule + section.rstrip("\n") + more + rest).split("\n")


def _readable(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Write a default that is made anew as `...`, and an alias by its name."""

    def readable(text: str | None) -> str | None:
        return text and re.sub(
            r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text.replace("<factory>", "...")
        )

    return readable(signature), readable(returned)


def _inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _display(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def _redirect(app: Sphinx, error: Exception | None) -> None:
    """Let the folder's own index lead to the map."""
    if error is None and app.builder.format == "html":
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        Path(app.outdir, "index.html").write_text(page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what this file adds to Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":  # what napoleon makes of "Attributes"
            field.label = "Attributes"
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    app.connect("source-read", _add_toctrees)
    app.connect("autodoc-process-docstring", _one_by_one, priority=100)
    app.connect("autodoc-process-signature", _readable)
    app.connect("build-finished", _redirect)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
