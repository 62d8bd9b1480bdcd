"""The site: `make docs` builds it from README.md, docs/ and the tables of results/ into build/site."""

import argparse
import re
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docutils import nodes  # noqa: E402
from docutils.utils.math.latex2mathml import tex2mathml  # noqa: E402

import parzen  # noqa: E402
from parzen.cli import parser  # noqa: E402

project = "parzen"
version = release = parzen.__version__
copyright = "the parzen developers, Apache-2.0"

# The root of the repository is the root of the sources, so that a link leads to the same place on the site
# and between the files.
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "results/**"]
# A folder that is excluded is not walked through, either.
folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
exclude_patterns = [*(folders - {"docs", "results"}), "results/**/runs"]
CONTENTS = {
    "Tutorials": ("replace-softmax", "regression", "train-a-mosaic", "add-a-kernel", "cluster"),
    "Guides": ("choosing", "losses", "speed", "moving", "transformers", "memory", "gpu", "report"),
    "Background": ("math", "design", "results"),
}
REFERENCE = (
    "parzen",
    "kernels",
    "losses",
    "nn",
    "memory",
    "regression",
    "testing",
    "models",
    "transformers",
    "entmax",
    "lab",
    "command",
)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The buttons that copy code are worth a package, but a site without them is whole.
extensions += ["sphinx_copybutton"] if find_spec("sphinx_copybutton") else []
myst_enable_extensions = ["dollarmath"]
# Formulas are MathML, which browsers set themselves: no script, and nothing is fetched.
html_math_renderer = "mathml"
# A prompt is not copied, and what is printed below it neither.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
myst_heading_anchors = 3
highlight_language = "text"

html_theme = "furo"
html_title = "parzen"
html_show_sphinx = False
html_copy_source = False
html_extra_path = ["html"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Several attributes may share a line, as parameters may.
napoleon_custom_sections = [("Attributes", "params_style")]
maximum_signature_line_length = 80
# Every name in a docstring or a signature must lead somewhere, but for those of others.
nitpicky = True
OTHERS = (
    r"(torch|collections|numpy|pathlib|argparse|transformers)\..*|Tensor|Path|Number|UserError|Terminated"
)
nitpick_ignore_regex = [("py:.*", OTHERS)]


def contents(app, docname, source):
    """Adds the table of contents to the front page, and what a page of the reference is generated from."""
    if docname == root_doc:
        named = {f"docs/{page}" for pages in CONTENTS.values() for page in pages}
        there = {str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("docs/*.md")}
        for title, pages in CONTENTS.items():
            listed = [f"docs/{page}" for page in pages if f"docs/{page}" in there]
            more = sorted(there - named) if title == "Guides" else []
            source[0] += toctree(title, listed + more)
        source[0] += toctree("Reference", [f"docs/reference/{page}" for page in REFERENCE])
        source[0] += toctree("Project", ["results/README", "CONTRIBUTING", "CHANGELOG"])
    elif docname == "results/README":
        tables = sorted(set(ROOT.glob("results/**/*.md")) - {ROOT / "results/README.md"})
        source[0] += toctree("Tables", [str(table.relative_to(ROOT / "results")) for table in tables])
    elif docname.startswith("results/"):
        source[0] = f"# {docname.removeprefix('results/').removesuffix('/table')}\n\n{source[0]}"
    elif docname == "docs/reference/command":
        source[0] += "\n".join(commands())


def toctree(title, pages):
    """The directive, hidden in the page and shown at its side."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def commands():
    """The lines that describe every command and option, from the parsers themselves."""
    (subparsers,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in subparsers.choices.items():
        formatter = argparse.HelpFormatter(command.prog, width=80)
        yield from ("", name, "-" * len(name), "", escape(command.description), "")
        yield from (".. code-block:: text", "")
        usage = command.format_usage().removeprefix("usage: ").replace("\n       ", "\n")
        yield from ("   " + line for line in usage.splitlines())
        yield from ("", f".. program:: {command.prog}", "")
        for action in command._actions:
            if action.dest != "help":
                yield f".. option:: {formatter._format_action_invocation(action)}"
                yield from ("", "   " + escape(formatter._expand_help(action) if action.help else ""), "")


def escape(text):
    """The text with what reStructuredText would read as markup kept as it is."""
    return re.sub(r"([*`|_\\]|--)", r"\\\1", text)


def formulas(app, what, name, obj, options, lines):
    """Makes an indented formula of a docstring, between empty lines, a literal block, and no list of "H."."""
    done = []
    for line in lines:
        before = next((old for old in reversed(done) if old), "")
        if line.startswith(" ") and done and not done[-1] and before and not before.startswith(" "):
            done += ["::", ""]
        done.append(re.sub(r"^( +[\w, ]+: )(\w\.)", r"\1\\\2", line))
    lines[:] = done


def mathml(block):
    """The visitor that writes a formula as MathML."""

    def visit(translator, node):
        translator.body.append(tex2mathml(node.astext(), as_block=block))
        raise nodes.SkipNode

    return visit, None


def setup(app):
    """Connects these with Sphinx."""
    app.add_html_math_renderer("mathml", mathml(block=False), mathml(block=True))
    app.connect("autodoc-process-docstring", formulas, priority=400)
    app.connect("source-read", contents)
