"""Reading a configuration: `--config FILE` (YAML), then flags over it; and writing the resolved one back as YAML.

Flags and YAML keys are made from the dataclasses of `schema.py`. Underscores and dashes are the same in both.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from megatron_rgpt.config.layout import Layout
from megatron_rgpt.config.megatron_flags import explain_unknown_flag
from megatron_rgpt.config.schema import Config
from megatron_rgpt.errors import UserError

_EXCLUSIVE = (
    (frozenset({"train_iters"}), frozenset({"train_samples"})),
    (frozenset({"data_path"}), frozenset({"train_data_path", "valid_data_path", "test_data_path"})),
)
"""Fields of which a run has one side."""


@dataclass(frozen=True)
class Invocation:
    """One call of the main job: the configuration and what to do with it."""

    config: Config
    given: frozenset[str]
    """Names of the fields that the user set, by YAML or by flag."""
    dry_run: bool
    json: bool
    world_size: int | None
    """Ranks that a dry run plans for; None: those of this launch."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(message.removeprefix("argument "))


def parse_invocation(argv: Sequence[str]) -> Invocation:
    """Read flags as the main job gets them. Raises `UserError` for unknown, malformed or contradictory ones."""
    parser = _build_parser()
    given, unknown = parser.parse_known_args([_dashed(token) for token in argv])
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        flag = next((token for token in unknown if token.startswith("--")), unknown[0])
        raise UserError(explain_unknown_flag(flag.partition("=")[0], known))
    values = vars(given)
    dry_run, as_json, world_size = (values.pop(name) for name in ("dry_run", "json", "world_size"))
    if (as_json or world_size) and not dry_run:
        raise UserError("--json and --world-size are for --dry-run: add it")
    values.pop("local_rank")
    yaml_file = values.pop("config")
    merged, given = read_yaml(yaml_file) if yaml_file else {}, _without_aliases(values)
    for one, other in _EXCLUSIVE + tuple((b, a) for a, b in _EXCLUSIVE):
        if given.keys() & one:
            # a flag also wins over what excludes it in the file
            merged = {name: value for name, value in merged.items() if name not in other}
    merged.update(given)
    return Invocation(Config().changed(**merged), frozenset(merged), dry_run, as_json, world_size)


def read_yaml(path: str) -> dict[str, Any]:
    """The fields a YAML file sets, converted to their types. Raises `UserError` naming file and key."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not valid YAML: {error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected lines of `key: value`, found a {type(content).__name__}")
    by_key = {spelling: field for field in config_fields() for spelling in _yaml_keys(field)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        dashed = _dash(str(key))
        field = by_key.get(dashed)
        if field is None and (meant := _from_flag_like_key(dashed, value)):
            values.update(meant)
            continue
        if field is None:
            raise UserError(f"--config {path}: {explain_unknown_flag('--' + str(key), ['--' + k for k in by_key])}")
        if field.name in values:
            raise UserError(f"--config {path}: key {key!r} sets {field.name} a second time")
        try:
            values[field.name] = _convert_yaml(value, field.type_hint)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise UserError(f"--config {path}: {key}: {value!r}: {error}") from None
    return values


def to_yaml(config: Config) -> str:
    """The resolved configuration as a file that `--config` accepts, grouped as in the dataclasses."""
    lines = []
    for section in fields(config):
        values = getattr(config, section.name)
        lines.append(f"# {section.name}")
        for field in fields(values):
            value = getattr(values, field.name)
            plain = str(value) if isinstance(value, Layout) else list(value) if isinstance(value, tuple) else value
            lines.append(f"{_dash(field.name)}: {_yaml_scalar(plain)}")
        lines.append("")
    return "\n".join(lines)


@dataclass(frozen=True)
class ConfigField:
    """One field of one section, with its evaluated type."""

    section: str
    title: str
    name: str
    type_hint: Any
    default: Any
    metadata: Any


def config_fields() -> list[ConfigField]:
    """Every field of the configuration, in order."""
    found = []
    for section in fields(Config):
        cls = section.default_factory
        hints = get_type_hints(cls)
        title = cls.__doc__.splitlines()[0]
        found += [_config_field(section.name, title, field, hints[field.name]) for field in fields(cls)]
    return found


def _config_field(section: str, title: str, field: Field, hint: Any) -> ConfigField:
    return ConfigField(section, title, field.name, hint, field.default, field.metadata)


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="pretrain_rgpt.py",
        usage="%(prog)s [--config FILE] [flags]",
        allow_abbrev=False,
        description="Pretrain a recurrent-depth transformer. Flags override --config; defaults are in brackets.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=110),
    )
    run = parser.add_argument_group("run")
    run.add_argument("--config", metavar="FILE", help="YAML file of `flag: value` lines, read before the flags")
    run.add_argument("--dry-run", action="store_true", help="check everything, print sizes and layout, train nothing")
    run.add_argument("--json", action="store_true", help="with --dry-run: print one JSON object")
    run.add_argument("--world-size", type=_converter(int), metavar="N", help="with --dry-run: plan for N ranks")
    # The `deepspeed` launcher appends this; the environment says the same.
    run.add_argument("--local-rank", help=argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in config_fields():
        if field.section not in groups:
            groups[field.section] = parser.add_argument_group(field.section, field.title)
        _add_flag(groups[field.section], field)
    return parser


def _add_flag(group: argparse._ArgumentGroup, field: ConfigField) -> None:
    flag, inner = "--" + _dash(field.name), _strip_optional(field.type_hint)
    shown = field.metadata["help"] + ("" if field.default in (None, ()) else f" [{_shown(field.default)}]")
    common = {"dest": field.name, "default": argparse.SUPPRESS, "help": shown}
    if inner is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        return
    common["metavar"] = _metavar(inner)
    if get_origin(inner) is tuple:
        group.add_argument(flag, nargs="+", type=str, action=_StoreTuple, **common)
    else:
        group.add_argument(flag, type=_converter(inner), **common)
    if alias := field.metadata.get("alias"):
        alias_of = {**common, "dest": _alias_dest(field.name, alias), "help": f"the same as {flag}"}
        group.add_argument(alias, type=_converter(inner), **alias_of)
    for preset, value in field.metadata.get("presets", {}).items():
        preset_of = {"dest": _alias_dest(field.name, preset), "default": argparse.SUPPRESS}
        group.add_argument(preset, action="store_const", const=value, help=f"the same as {flag} {value}", **preset_of)


class _StoreTuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


_ALIAS = "|"


def _alias_dest(name: str, flag: str) -> str:
    return f"{name}{_ALIAS}{flag}"


def _without_aliases(values: dict[str, Any]) -> dict[str, Any]:
    """Fold aliases and presets into their field; two that disagree are an error."""
    merged: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for dest, value in values.items():
        name, _, alias = dest.partition(_ALIAS)
        flag = alias or "--" + _dash(name)
        if name in merged and merged[name] != value:
            raise UserError(
                f"{spelled[name]} {merged[name]} and {flag} {value} contradict each other: give one of them"
            )
        merged[name], spelled[name] = value, flag
    return merged


def _yaml_keys(field: ConfigField) -> list[str]:
    alias = field.metadata.get("alias")
    return [_dash(field.name)] + ([alias.removeprefix("--")] if alias else [])


def _from_flag_like_key(key: str, value: Any) -> dict[str, Any]:
    """What a key that is only a flag means: `bf16: true`, `no-gate: true`; empty where it is none."""
    if value is not True:
        return {}
    for field in config_fields():
        for preset, meant in field.metadata.get("presets", {}).items():
            if key == preset.removeprefix("--"):
                return {field.name: meant}
        if _strip_optional(field.type_hint) is bool and key == "no-" + _dash(field.name):
            return {field.name: False}
    return {}


def _convert_yaml(value: Any, hint: Any) -> Any:
    inner = _strip_optional(hint)
    if value is None:
        if inner is hint and get_origin(inner) is not tuple:
            raise ValueError("needs a value")
        return None if inner is not hint else ()
    if inner is bool:
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value
    if get_origin(inner) is tuple:
        items = value if isinstance(value, list) else str(value).split()
        return tuple(str(item) for item in items)
    if isinstance(value, (dict, list, bool)):
        raise ValueError(f"expected {_metavar(inner)}")
    return _converter(inner)(str(value))


def _converter(inner: Any) -> Any:
    """A function from text to the field's type; its errors say what was expected."""
    if inner is Layout:
        return _layout
    if inner is str:
        return str
    if get_origin(inner) is Literal:
        return lambda text: _choice(text, get_args(inner))
    return lambda text: _number(text, inner)


def _layout(text: str) -> Layout:
    try:
        return Layout.parse(text)
    except UserError as error:
        # argparse would hide the message of a ValueError
        raise argparse.ArgumentTypeError(str(error)) from None


def _choice(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(choices)}")
    return text


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}") from None


def _yaml_scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _strip_optional(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def _metavar(inner: Any) -> str:
    if get_origin(inner) is Literal:
        return "{" + ",".join(get_args(inner)) + "}"
    return {int: "N", float: "X", Layout: "p+bxR+c"}.get(inner, "TEXT")


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def _dash(name: str) -> str:
    return name.replace("_", "-")


def _dashed(token: str) -> str:
    """`--deepspeed_config=a_b` is `--deepspeed-config=a_b`: users type both."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return _dash(name) + equals + value
