"""TOML to `Recipe`: every key known, every value of its type, or a refusal that names the key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from exl3kit.quantize.bit_plan import Bits
from exl3kit.quantize.recipe import (
    GROUPS,
    CalibrationRecipe,
    MtpMode,
    Recipe,
    RecipeError,
    Rule,
)

KEEP = "keep"
_MTP_MODES = ("bf16", "trellis")
_MAX_BITS = 8


def read_recipe(path: Path) -> Recipe:
    """The recipe of a TOML file; calibration files are taken relative to its folder.

    RecipeError names the key with expected and got; an unknown one comes with the nearest known.
    """
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML: TOMLDecodeError says where
        raise RecipeError(f"{path}: not TOML: {error}") from error
    top = _Table(document, str(path))
    top.check_keys(("experts", "mtp", "seed", "dense", "calibration", "rules"))
    return Recipe(
        experts=top.bits("experts") if "experts" in document else None,
        mtp=_mtp(top),
        seed=top.count("seed", 0, least=0),
        dense=_dense(top.table("dense")),
        calibration=_calibration(top.table("calibration"), path.parent),
        rules=tuple(_rule(table) for table in top.tables("rules")),
    )


def _mtp(top: _Table) -> MtpMode:
    mode = top.text("mtp", _MTP_MODES[0])
    if mode not in _MTP_MODES:
        raise top.error("mtp", f"one of {', '.join(_MTP_MODES)}", mode)
    return cast("MtpMode", mode)


def _dense(table: _Table) -> dict[str, Bits]:
    table.check_keys(GROUPS)
    return {group: table.bits(group) for group in table.values}


def _calibration(table: _Table, folder: Path) -> CalibrationRecipe:
    table.check_keys(("files", "text_field", "rows", "cols", "route_all"))
    default = CalibrationRecipe()
    return CalibrationRecipe(
        files=tuple(folder / name for name in table.texts("files")),
        text_field=table.text("text_field", "") or None,
        rows=table.count("rows", default.rows, least=1),
        cols=table.count("cols", default.cols, least=1),
        route_all=table.flag("route_all"),
    )


def _rule(table: _Table) -> Rule:
    table.check_keys(("modules", "bits"))
    for key in ("modules", "bits"):
        if key not in table.values:
            raise RecipeError(f"{table.where}: key {key!r} is missing")
    bits = None if table.values["bits"] == KEEP else table.bits("bits", f", or {KEEP!r}")
    return Rule(table.text("modules", ""), bits)


class _Table:
    """One TOML table; `where` is the file, and the table's name in it."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise RecipeError(f"{where}: expected a table, got {values!r}")
        self.values: Mapping[str, Any] = values
        self.where = where

    def error(self, key: str, expected: str, got: object) -> RecipeError:
        return RecipeError(f"{self.where}: {key}: expected {expected}, got {got!r}")

    def check_keys(self, known: Iterable[str]) -> None:
        names = tuple(known)
        for key in self.values:
            if key not in names:
                near = get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                raise RecipeError(f"{self.where}: unknown key {key!r}; {hint}")

    def bits(self, key: str, also: str = "") -> Bits:
        """A number from 1 to 8; which rates a module may have is for the bit plan to say."""
        value = self.values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= _MAX_BITS:
            raise self.error(key, f"bits from 1 to {_MAX_BITS}{also}", value)
        return int(value) if value == int(value) else value

    def count(self, key: str, default: int, least: int) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or value < least:
            raise self.error(key, f"a whole number of at least {least}", value)
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings", value)
        return value

    def table(self, key: str) -> _Table:
        return _Table(self.values.get(key, {}), f"{self.where}: [{key}]")

    def tables(self, key: str) -> list[_Table]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"tables, each under [[{key}]]", value)
        return [_Table(item, f"{self.where}: [[{key}]] {i}") for i, item in enumerate(value, 1)]
