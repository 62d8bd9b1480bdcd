"""The site builds without a warning, needs no other host, and has every public name and command."""

import argparse
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import parzen
from parzen.cli import parser

ROOT = Path(__file__).parent.parent
ELSEWHERE = re.compile(r"""(?:src=|<link[^>]*href=|url\(|@import\s+)["']?((?:https?:)?//[^"')\s>]+)""")


# One test for all: the tests of a file may run in several processes, and each would build the site.
def test_site(tmp_path):
    options = ("--quiet", "--fail-on-warning", "--keep-going", "--jobs", "auto", "--conf-dir", ROOT / "docs")
    places = ("--doctree-dir", tmp_path / "doctrees", ROOT, tmp_path / "site")
    done = subprocess.run([sys.executable, "-m", "sphinx", *options, *places], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    files = [path for kind in ("html", "css", "js") for path in site.rglob(f"*.{kind}")]
    texts = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in files}
    for name, text in texts.items():
        assert not ELSEWHERE.findall(text), name
    assert 'url=README.html"' in texts["index.html"]
    assert "biweight" in texts["searchindex.js"]
    # Formulas are typeset, and code can be copied, without another host.
    assert len(re.findall(r'<math [^>]*display="block"', texts["docs/math.html"])) >= 6
    assert "<mfrac>" in texts["docs/math.html"]
    assert "$$" not in texts["docs/math.html"]
    if find_spec("sphinx_copybutton"):
        assert "copybutton.js" in texts["docs/math.html"]
    else:
        print("sphinx-copybutton is not installed: the site is built without its buttons")

    # The side bar leads to every page.
    listed = set(re.findall(r'class="reference internal" href="([^"#]+)"', texts["README.html"]))
    assert {name for name in texts if re.match(r"(docs|results)/.*\.html", name)} <= listed

    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in texts.items()}
    reference = set().union(*(anchors[name] for name in anchors if name.startswith("docs/reference/")))
    named = {anchor.rpartition(".")[2] for anchor in reference if anchor.startswith("parzen.")}
    layers = {"KernelAttention", "BANDWIDTHS", "POSITIONS", "convert", "anneal", "match"}
    assert {*parzen.__all__, *layers, "check_kernel", "Mosaic", "register"} <= named

    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        options = {option for action in command._actions for option in action.option_strings}
        for option in options - {"-h", "--help"}:
            assert f"cmdoption-parzen-{name}-{option.strip('-')}" in anchors["docs/reference/command.html"]
