"""The target role: loads a stage, and opens sessions on it and on the stages behind it.

`role` is what the worker holds, `loaded_stage` what was loaded, and `drafts` opens the drafts of the stage's sessions.
The room owns which sessions are open. It must not know how a session takes its steps.
"""

from __future__ import annotations

from shard_worker.roles import RoleResources
from shard_worker.roles.target.role import TargetRole


def make_role(resources: RoleResources) -> TargetRole:
    """Make the role; the worker finds this function by the module's name."""
    return TargetRole(resources)
