"""Configuration of the documentation: sphinx-build -W -b html docs docs/_build."""

import enum
import importlib
import inspect
import operator
import os
import re
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective

import hpcstrat

project = "hpcstrat"
author = "the hpcstrat authors"
copyright = author  # noqa: A001 - the name that Sphinx reads
release = hpcstrat.__version__

extensions = [
    "sphinx.ext.autodoc",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = False
# Pages show what is there for other libraries where these are not installed, too.
autodoc_mock_imports = [
    name for name in ("jax", "keras", "lightning", "torch") if find_spec(name) is None
]
# Keras imports TensorFlow, unless this variable names another backend.
_backends = [name for name in ("tensorflow", "torch", "jax") if find_spec(name)]
if _backends:
    os.environ.setdefault("KERAS_BACKEND", _backends[0])
elif "keras" not in autodoc_mock_imports:
    autodoc_mock_imports.append("keras")
if "torch" in autodoc_mock_imports:
    # It makes the backend known to torch.
    autodoc_mock_imports.append("hpcstrat.integrations.torch.at_import")
default_role = "py:obj"

autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    # What these give to their subclasses is Python's or NumPy's own.
    "inherited-members": (
        "BaseException, Enum, Exception, NDArrayOperatorsMixin, object, tuple"
    ),
}
autodoc_typehints = "none"
add_module_names = False
numpydoc_show_class_members = False
# A name such as `reduce` in a docstring has several homes.
suppress_warnings = ["ref.python"]

# What the docstring of a member says that is none for users.
_INTERNAL = re.compile(r"\bfor\s+the\s+library's\s+own\s+modules\b", re.I)
# A list of links to pages, with its heading.
_PAGE_LIST = re.compile(r"^(?:## (.+)\n\n)?((?:- \[.+\]\(\S+\.md\)\n){3,})", re.M)
# A comment with words for the search.
_INDEX_ENTRIES = re.compile(r"^<!-- index: (.+) -->$", re.M)

# The table of contents shows a method below its class, and needs no second class name.
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = f"hpcstrat {release}"
html_logo = html_favicon = "images/logo.svg"
html_show_sourcelink = html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"index": []}
html_theme_options: dict[str, Any] = {
    "logo": {"text": "hpcstrat"},
    "navbar_start": ["navbar-logo"],
    "header_links_before_dropdown": 7,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": ["sphinx-version"],
    "footer_end": ["theme-version"],
    "show_prev_next": True,
}


def _offer_versions(_app: Sphinx, config: Config) -> None:
    """Show the list of versions where the pages are one of several.

    They are where their builder names the version, as docs/versions.py does.
    """
    if config.version:
        config.html_theme_options |= {
            "navbar_start": ["navbar-logo", "version-switcher"],
            "check_switcher": False,  # It lies beside the folder of these pages.
            "show_version_warning_banner": True,
            "switcher": {
                "json_url": "../switcher.json",
                "version_match": config.version,
            },
        }


def _kind(value: Any) -> str:
    """Return the name of the directive that documents a value."""
    if not isinstance(value, type):
        return "autofunction" if callable(value) else "autodata"
    return "autoexception" if issubclass(value, BaseException) else "autoclass"


def claimed_keys() -> set[str]:
    """Return the keys of the table that pages of the reference name."""
    pages = (page.read_text() for page in (Path(__file__).parent / "api").glob("*.md"))
    lines = re.findall(r"^```{public-names} (.*)$", "\n".join(pages), re.M)
    return {key for line in lines for key in line.split()}


class PublicNames(SphinxDirective):
    """Document the public names that come from some modules of hpcstrat.

    The arguments are keys of the table in ``hpcstrat/__init__.py``, so that a name that
    is added there appears here by itself; or ``others``, for the keys that no page
    names; or modules with names of their own, such as ``optimizers``.
    """

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Expand to one autodoc directive for each name."""
        table = {**dict.fromkeys(hpcstrat._MODULES, ()), **hpcstrat._NAMES}
        keys = self.arguments[0].split()
        if keys == ["others"]:
            claimed = claimed_keys()
            keys = [key for key in table if key not in claimed]
        lines = ["```{eval-rst}"]
        for key in keys:
            for name in _in_order(_names(key, table)):
                value = _resolve(name)
                lines += [f".. {_kind(value)}:: {name}", *_options(value), ""]
        lines += ["```"]
        node = nodes.Element()
        self.state.nested_parse(StringList(lines), self.content_offset, node)
        return node.children


def _names(key: str, table: dict[str, Any]) -> list[str]:
    """Return the full names that a key of the table stands for."""
    public = [f"hpcstrat.{name}" for name in table[key]]
    if key in hpcstrat._MODULES:
        module = importlib.import_module(f"hpcstrat.{hpcstrat._MODULES[key]}")
        own = [name for name in module.__all__ if name not in hpcstrat.__all__]
        values = [name for name in own if not inspect.ismodule(getattr(module, name))]
        public += [f"hpcstrat.{key}.{name}" for name in values]
    return public


def _in_order(names: list[str]) -> list[str]:
    """Return names, base classes before their subclasses, and functions last."""
    values = {name: _resolve(name) for name in names}

    def place(name: str) -> tuple[bool, int]:
        is_class = inspect.isclass(values[name])
        bases = values[name].__mro__[1:] if is_class else ()
        return not is_class, sum(base in values.values() for base in bases)

    return sorted(names, key=place)


@cache
def _public_classes() -> set[type]:
    """Return the classes that the reference shows."""
    table = {**dict.fromkeys(hpcstrat._MODULES, ()), **hpcstrat._NAMES}
    values = [_resolve(name) for key in table for name in _names(key, table)]
    return {value for value in values if inspect.isclass(value)}


def _public_bases(shown: type) -> list[type]:
    """Return the classes in the reference that a class inherits from."""
    return [base for base in shown.__mro__[1:] if base in _public_classes()]


def _options(shown: Any) -> list[str]:
    """Return the options of a class's directive: each method is shown once.

    A class names its base, and leaves out what the base shows, but for what it defines
    anew with a docstring of its own.
    """
    bases = _public_bases(shown) if inspect.isclass(shown) else []
    again = {
        name
        for base in bases
        for name in dir(base)
        if not name.startswith("_")
        and (name not in vars(shown) or _document(shown, name) == _document(base, name))
    }
    if not bases:
        return []
    left_out = f"   :exclude-members: {', '.join(sorted(again))}"
    return ["   :show-inheritance:", *([left_out] if again else [])]


def _document(owner: type, name: str) -> str | None:
    """Return the docstring of a member, also of one that has it from its base."""
    return inspect.getdoc(inspect.getattr_static(owner, name))


def _resolve(name: str) -> Any:
    """Return the object of a full name."""
    return operator.attrgetter(name.removeprefix("hpcstrat."))(hpcstrat)


def _make_index_entries(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Make the comments ``<!-- index: ! max, ! min -->`` entries that the search finds.

    The entries are separated by commas. The search shows pages of entries with an
    exclamation mark first. The repository's pages do not show comments.
    """
    source[0] = _INDEX_ENTRIES.sub(r"\n```{index} \1\n```\n", source[0])


def _link_to_index(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Let links to the README, which is no page here, lead to the first page."""
    source[0] = source[0].replace("](../README.md)", "](index.md)")


def _signature(
    _app: Sphinx, what: str, _name: str, value: Any, _options: Any, *_texts: str | None
) -> tuple[str, None] | None:
    """Show the arguments of ``__init__`` where ``__new__`` takes any."""
    if isinstance(value, enum.EnumType):
        return "", None
    own = getattr(value, "__new__", None)
    if what != "class" or not inspect.isfunction(own):
        return None
    parameters = list(inspect.signature(value.__init__).parameters.values())[1:]
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in parameters
    ]
    return str(inspect.Signature(plain)), None


def _is_internal(
    _app: Sphinx, _what: str, _name: str, value: Any, _skipped: bool, _options: Any
) -> bool | None:
    """Leave out what is for the library's own modules; None leaves it as it is."""
    return True if _INTERNAL.search(inspect.getdoc(value) or "") else None


def _name_bases(
    _app: Sphinx, _name: str, value: Any, _options: Any, bases: list[Any]
) -> None:
    """Name the base class that the reference shows, not one in between."""
    bases[:] = _public_bases(value)[:1] or bases


def _name_members(
    _app: Sphinx, _what: str, _name: str, value: Any, _options: Any, lines: list[str]
) -> None:
    """Name the members of an enumeration, which have no docstrings."""
    if isinstance(value, enum.EnumType):
        members = ", ".join(f"``{member}``" for member in value.__members__)
        lines += ["", f"Members: {members}.", ""]


def _make_toctrees(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the lists of pages, which are links where nothing is built, toctrees."""
    first = Path(app.srcdir, "index.md").read_text()
    sections = re.findall(r"^- \[.+\]\((\S+)\.md\)$", first, re.M)
    if docname in ("index", "gallery/index"):  # The bar, or pictures, show them.
        source[0] = _PAGE_LIST.sub(partial(_toctree, hidden=True), source[0])
    elif docname in sections:
        source[0] = _PAGE_LIST.sub(_toctree, source[0])


def _toctree(found: re.Match[str], *, hidden: bool = False) -> str:
    """Return a toctree for a list of links; the bar at the top shows a hidden one."""
    pages = "\n".join(re.findall(r"\((.*)\.md\)$", found[2], re.M))
    heading = f"## {found[1]}\n\n" if found[1] and not hidden else ""
    option = ":hidden:" if hidden else ":maxdepth: 1"
    return f"{heading}```{{toctree}}\n{option}\n\n{pages}\n```\n"


def _let_names_break(
    _app: Sphinx, _domain: str, _kind: str, content: addnodes.desc_content
) -> None:
    """Let long names in the table of contents continue in a new line after a _."""
    for signature in content.parent.children:
        if name := signature.get("_toc_name"):
            signature["_toc_name"] = name.replace("_", "_\N{ZERO WIDTH SPACE}")


def _mark_blocks(_app: Sphinx, doctree: nodes.document) -> None:
    """Mark text in columns, which is not wrapped; shorten paths of files in diffs."""
    for block in doctree.findall(nodes.literal_block):
        # A parsed literal in a docstring has no language.
        language = block.get("language")
        if language == "text" and re.search(r"\S   +\S", block.astext()):
            block["classes"].append("in-columns")
        if language == "udiff":
            text = re.sub(r"^(---|\+\+\+) \S*/", r"\1 ", block.astext(), flags=re.M)
            block.rawsource = text
            block.children = [nodes.Text(text)]


def setup(app: Sphinx) -> None:
    """Add the directive, and what changes pages."""
    app.add_directive("public-names", PublicNames)
    app.connect("config-inited", _offer_versions)
    app.connect("source-read", _link_to_index)
    app.connect("source-read", _make_toctrees)
    app.connect("source-read", _make_index_entries)
    app.connect("object-description-transform", _let_names_break)
    app.connect("doctree-read", _mark_blocks)
    app.connect("autodoc-skip-member", _is_internal)
    app.connect("autodoc-process-bases", _name_bases)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _name_members)
