"""Write docs/config.md, the page on the configuration keys, from the schema in eyas.config.

`--check` writes nothing; it exits 1 when the page is out of date.
"""

import argparse
import ast
import inspect
import json
import sys
import textwrap
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "workflow"))

from eyas.config import Config  # noqa: E402 (the checkout's package, installed or not)
from eyas.config.fields import Asked, Strict  # noqa: E402

PAGE = CHECKOUT / "docs" / "config.md"

INTRODUCTION = """\
<!-- Written by docs/make_config_page.py from workflow/eyas/config/schema.py; do not edit. -->

# Configuration keys

A run is described by one YAML file: `config/config.yaml`, or the file given with `--configfile`, which stands alone
and is not merged with the default one. Keys are written here with their path: `data.rows` is the key `rows` in the
section `data`; `<name>` and `<file>` stand for names of your own. Unknown keys, wrong types and values outside the
limits are errors, and so are combinations that cannot work: a draft vocabulary larger than the target's, layer ids
outside the target, `model.init: target_layer` with another width than the target's, `data.held_out_every` above
`data.rows`, `responses.max_new_tokens` that leaves no room for a prompt in `tokenization.max_length`.

Keys marked *runtime* say how fast a stage runs, not what it makes (but for floating-point rounding): changing one
re-runs nothing. A changed key of another kind re-runs the stages that depend on it.
"""

# What stands for the names in a mapping whose keys are free.
FREE_NAMES = {"packages": "<file>", "drafters": "<name>", "evaluation.prompt_sets": "<name>"}
TYPES = {
    "object": "mapping",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
LIMITS = {
    "minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}", "exclusiveMaximum": "below {}",
    "maxLength": "at most {} characters", "pattern": "matches `{}`",
}  # fmt: skip


def docstrings(model):
    """The text below each field of a section, its own and those that it inherits."""
    found = {}
    for base in model.__mro__[::-1]:
        if not issubclass(base, Strict):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, text in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = inspect.cleandoc(text.value.value)
    return found


def sections(model=Strict):
    """All classes of sections, by name."""
    found = {}
    for inner in model.__subclasses__():
        found |= {inner.__name__: inner} | sections(inner)
    return found


def variants(schema):
    """The alternatives of a value: itself, or those of a union."""
    return schema.get("anyOf", [schema])


def type_of(schema):
    """The type of a value, in words."""
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(type_of(one) for one in schema["anyOf"])
    if schema["type"] == "array":
        return f"list of {type_of(schema['items'])}s"
    return TYPES[schema["type"]]


def limits_of(schema):
    """What a value is checked against, in words."""
    found = []
    for one in variants(schema):
        found += [text.format(one[key]) for key, text in LIMITS.items() if key in one]
        if one.get("minLength") or one.get("minItems"):
            found.append("not empty")
        if one.get("type") == "array" and (inner := limits_of(one["items"])):
            found.append(f"each {inner}")
    return ", ".join(found)


def section_of(schema, definitions):
    """The section that a key opens, itself or for each name in it; None for a plain key."""
    for one in variants(schema):
        for inner in [
            one,
            one.get("items"),
            one.get("additionalProperties"),
            *one.get("patternProperties", {}).values(),
        ]:
            if isinstance(inner, dict) and "$ref" in inner:
                return definitions[inner["$ref"].rsplit("/", 1)[1]]
    return None


def table_row(place, field, needed):
    """The line of a plain key."""
    default = "required" if needed else f"`{json.dumps(field['default'])}`"
    runtime = " *Runtime: changing it re-runs nothing.*" if field.get("runtime") else ""
    cells = [f"`{place}`", type_of(field), default, limits_of(field), field.get("description", "") + runtime]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def section_lines(schema, definitions, path="", level="##"):
    """A section's table, then the sections inside it, each with heading and table."""
    rows, inner = [], []
    last = Asked.model_fields  # what jobs ask for comes after what they do
    for key, field in sorted(schema["properties"].items(), key=lambda item: item[0] in last):
        place, needed = f"{path}.{key}".lstrip("."), key in schema.get("required", [])
        if not (section := section_of(field, definitions)):
            rows.append(table_row(place, field, needed))
            continue
        if place in FREE_NAMES:
            place += f".{FREE_NAMES[place]}"
        about = [field.get("description"), section["description"], "Required." if needed else "May be left out."]
        inner += ["", f"{level} `{place}`", "", " ".join(" ".join(filter(None, about)).split())]
        inner += section_lines(section, definitions, place, level + "#")
    head = ["", "| key | type | default | limits | meaning |", "|---|---|---|---|---|"] if rows else []
    return head + rows + inner


def page():
    """The whole page."""
    schema = Config.model_json_schema()
    classes = sections()
    for name, section in [("Config", schema), *schema["$defs"].items()]:
        for key, text in docstrings(classes[name]).items():
            section["properties"][key]["description"] = text
    return INTRODUCTION + "\n".join(section_lines(schema, schema["$defs"])) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/config.md is out of date: run `make docs` and commit the page")
