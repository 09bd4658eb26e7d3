"""Model packages are the registry's versions, and model package groups its groups."""

from gateway.core.addresses import PARTITION, arn
from gateway.core.errors import Conflict
from gateway.core.ids import VersionId
from gateway.core.versions import Version, VersionFilter, VersionKind, VersionState
from gateway.wire.sagemaker.calls import Call
from gateway.wire.sagemaker.models import Document
from gateway.wire.sagemaker.names import HUB_VERSION, group_arn, group_in, hub_name
from gateway.wire.sagemaker.sessions import LOCAL_STORE
from gateway.wire.sagemaker.tags import metadata_of
from gateway.wire.targets import find_version

MANAGED = "Restricted"  # the server keeps the files: clients that delete a package leave the files to it


async def create_group(call: Call) -> Document:
    """Make an empty group.

    Raises:
        Conflict: there is one.
    """
    name: str = call.asked["ModelPackageGroupName"]
    async with call.writing() as unit:
        made = await unit.versions.add_group(
            call.project_id,
            name,
            description=call.asked.get("ModelPackageGroupDescription", ""),
            user_metadata=metadata_of(call.asked.get("Tags", ())),
            at=call.clock.now(),
        )
    if not made:
        raise Conflict(f"model package group {name} already exists", code="group_exists", field="ModelPackageGroupName")
    return {"ModelPackageGroupArn": group_arn(name)}


async def describe_group(call: Call) -> Document:
    """Describe a group."""
    async with call.database.read() as unit:
        group = await unit.versions.group(call.project_id, _group(call))
    return {
        "ModelPackageGroupName": group.name,
        "ModelPackageGroupArn": group_arn(group.name),
        "ModelPackageGroupDescription": group.description or None,
        "CreationTime": group.created_at,
        "CreatedBy": {},
        "ModelPackageGroupStatus": "Completed",
        "ManagedConfiguration": {"ManagedStorageType": MANAGED},
    }


def _group(call: Call) -> str:
    return group_in(call.asked["ModelPackageGroupName"], field="ModelPackageGroupName")


async def list_page(call: Call) -> Document:
    """List a group's versions, newest first; without a group all of the project's."""
    call.refuse("NameContains", "ModelApprovalStatus", "CreationTimeAfter", "CreationTimeBefore")
    if call.asked.get("SortBy", "CreationTime") != "CreationTime":
        call.refuse("SortBy")
    if call.asked.get("SortOrder", "Descending") != "Descending":
        call.refuse("SortOrder")
    if call.asked.get("ModelPackageType") == "Unversioned":
        return {"ModelPackageSummaryList": []}
    token = call.asked.get("NextToken")
    async with call.database.read() as unit:
        group = None
        if "ModelPackageGroupName" in call.asked:
            group = (await unit.versions.group(call.project_id, _group(call))).name
        page = await unit.versions.page(
            call.project_id,
            VersionFilter(group=group),
            limit=call.page_size + 1,
            after=None if token is None else VersionId(token),
        )
    shown = page[: call.page_size]
    return {
        "ModelPackageSummaryList": [_summary(version) for version in shown],
        "NextToken": shown[-1].id if len(page) > len(shown) else None,
    }


def _summary(version: Version) -> Document:
    return {
        "ModelPackageGroupName": version.group,
        "ModelPackageVersion": version.number,
        "ModelPackageArn": arn(version),
        "ModelPackageDescription": version.labels.description or None,
        "CreationTime": version.created_at,
        "ModelPackageStatus": "Failed" if version.state is VersionState.REJECTED else "Completed",
    }


async def describe(call: Call) -> Document:
    """Describe a version: what it was trained on, whether training can go on from it, where its files are."""
    version = await _package(call)
    model = call.catalog.models.get(version.base_model)
    base = None
    if model is not None:
        base = {"HubContentName": hub_name(model), "HubContentVersion": HUB_VERSION}
    store = call.artifacts.url
    place = f"{LOCAL_STORE}/{version.group}/{version.number}" if store is None else f"{store}/{version.location}"
    source = {
        "S3DataSource": {
            "S3Uri": f"{place}/",
            "S3DataType": "S3Prefix",
            "CompressionType": "None",
        }
    }
    return {
        **_summary(version),
        "InferenceSpecification": {
            "Containers": [
                {
                    "IsCheckpoint": version.kind is VersionKind.STATE or None,
                    "BaseModel": base,
                    "ModelDataSource": source,
                }
            ]
        },
        "ModelPackageStatusDetails": {"ValidationStatuses": []},
        "ManagedStorageType": MANAGED,
    }


async def delete(call: Call) -> Document:
    """Let a version answer nothing from now on; its files go when it can no longer be brought back."""
    version = await _package(call)
    async with call.writing() as unit:
        await unit.registry.delete(
            call.project_id, version.id, force=True, by=call.principal.key_id, at=call.clock.now()
        )
    return {}


async def _package(call: Call) -> Version:
    """Return the version that the call names.

    Raises:
        NotFound: there is none, or it was deleted.
    """
    reference: str = call.asked["ModelPackageName"]
    if not reference.startswith("arn:"):
        reference = f"{PARTITION}:model-package/{reference}"
    async with call.database.read() as unit:
        version = await find_version(unit, call.project_id, reference, field="ModelPackageName")
    version.require_present(call.clock.now(), field="ModelPackageName")
    return version
