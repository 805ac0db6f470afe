"""What a cluster file says to Kubernetes alone: the two `kubernetes` mappings, checked by pydantic."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from coordinator.config.file_fields import Fields

_VERSION = metadata.version("flashsplit")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTPE]i?|m)?")


def _check_name(value: str) -> str:
    """Return a name of an object. Raises ValueError for what is none."""
    if _NAME.fullmatch(value) is None:
        raise ValueError("write up to 63 lower-case letters, digits and hyphens, like flashsplit")
    return value


def _check_quantity(value: str | int | float) -> str:
    """Return a quantity as text. Raises ValueError for what Kubernetes doesn't take as one."""
    text = str(value)
    if _QUANTITY.fullmatch(text) is None:
        raise ValueError("write a quantity of Kubernetes, like 24Gi for memory or 4 for cores")
    return text


def _check_directory(value: str) -> str:
    """Return an absolute path without a slash at its end. Raises ValueError for another path."""
    if not value.startswith("/") or value.rstrip("/") == "":
        raise ValueError("write an absolute path, like /models")
    return value.rstrip("/")


Name = Annotated[str, AfterValidator(_check_name)]
Quantity = Annotated[str | int | float, AfterValidator(_check_quantity)]
Directory = Annotated[str, AfterValidator(_check_directory)]


class WorkerPod(Fields):
    """What `kubernetes` says of one worker. device: as the pod numbers its devices, from 0; without it, `at` tells."""

    replicas: Literal[1] = 1
    device: str | None = None
    gpus: int | None = Field(None, ge=0, le=64)
    image: str | None = None
    memory: Quantity | None = None
    cpu: Quantity | None = None
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, str | int]] = []
    runtime_class: Name | None = None
    groups: list[int] = Field([], description="ids that own /dev/kfd and /dev/dri on AMD nodes")


class Images(Fields):
    """The container images of the coordinator, and of workers by their devices' vendor."""

    coordinator: str = f"flashsplit/coordinator:{_VERSION}"
    cpu: str = f"flashsplit/worker:{_VERSION}-cpu"
    cuda: str = f"flashsplit/worker:{_VERSION}-cuda"
    hip: str = f"flashsplit/worker:{_VERSION}-rocm"


class ClusterPods(Fields):
    """What `kubernetes` says of the whole cluster. A claim with a size is made; one without must be there."""

    namespace: Name = "flashsplit"
    images: Images = Images()
    model_mount: Directory = "/models"
    weights_claim: Name = "weights"
    weights_size: Quantity | None = None
    weights_access: Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"] = "ReadWriteMany"
    prefix_claim: Name = "prefixes"
    prefix_size: Quantity | None = None
    components: list[str] = Field([], description="directories of Kustomize components")
