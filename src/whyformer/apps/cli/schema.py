"""The JSON Schema of the output of commands with ``--json``."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from whyformer.apps.cli.output import COMMANDS


class _Schema(GenerateJsonSchema):
    """Remove titles that repeat a key, and defaults of optional keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def make_schema(command: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema of the ``--json`` output of one of :data:`COMMANDS`, or of all.

    Returns:
        A schema whose ``$defs`` hold each command under its name, and the parts that commands share.
    """
    references, generated = models_json_schema(
        [(kind, "validation") for kind in COMMANDS.values()],
        title="What whyformer prints with --json",
        description="One object for each run of a command. schema_version counts up when a key changes its meaning "
        "or goes away; new keys may appear at any time.",
        schema_generator=_Schema,
    )
    parts = generated["$defs"]
    for name, kind in COMMANDS.items():
        parts[name] = parts.pop(references[kind, "validation"]["$ref"].rpartition("/")[2])
    to = [{"$ref": f"#/$defs/{name}"} for name in COMMANDS]
    whole = {"$schema": GenerateJsonSchema.schema_dialect, **generated}
    return whole | ({"oneOf": to} if command is None else to[list(COMMANDS).index(command)])
