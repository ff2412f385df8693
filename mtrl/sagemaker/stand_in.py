"""The managed service's replacement in a dry run: a hub with one model, whose recipe has the table of
`hyperparameters`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mtrl.sagemaker import hyperparameters
from mtrl.sagemaker.session import default_region
from mtrl.sagemaker.wire import ACCOUNT, Answer, stream

if TYPE_CHECKING:
    from mtrl.sagemaker.managed_job import ManagedJob

EPOCH = datetime.fromtimestamp(0, UTC)


def answers(job: ManagedJob) -> dict[str, Answer]:
    """Return an answer for each operation that the SDK's classes call until they start a job."""
    region = job.settings.region or default_region()
    arn = f"arn:aws:sagemaker:{region}"
    model = f"{arn}:aws:hub-content/SageMakerPublicHub/Model/{job.settings.model}/1.0.0"
    recipe = {
        "Type": "FineTuning",
        "CustomizationTechnique": "MTRL",
        "Peft": "LORA",
        "SmtjRecipeTemplateS3Uri": "s3://hub/recipe.yaml",
        "SmtjOverrideParamsS3Uri": "s3://hub/parameters.json",
    }
    evaluation = {**recipe, "Type": "Evaluation", "EvaluationType": "MTRLEvaluation"}
    return {
        "DescribeHubContent": lambda request: {
            "HubContentName": str(job.settings.model),
            "HubContentArn": model,
            "HubContentType": "Model",
            "HubContentVersion": "1.0.0",
            "HubContentStatus": "Available",
            "DocumentSchemaVersion": "2.3.0",
            "HubName": "SageMakerPublicHub",
            "HubArn": f"{arn}:aws:hub/SageMakerPublicHub",
            "CreationTime": EPOCH,
            "HubContentDocument": json.dumps({"RecipeCollection": [recipe, evaluation]}),
        },
        "GetObject": lambda request: {"Body": stream(specification(job))},
        "DescribeModelPackageGroup": lambda request: {
            "ModelPackageGroupName": request["body"]["ModelPackageGroupName"],
            "ModelPackageGroupArn": f"{arn}:{ACCOUNT}:model-package-group/{request['body']['ModelPackageGroupName']}",
        },
        "ListArtifacts": lambda request: {"ArtifactSummaries": [{"ArtifactArn": f"{arn}:{ACCOUNT}:artifact/0"}]},
        "DescribeModelPackage": lambda request: {
            "ModelPackageName": "trained",
            "ModelPackageGroupName": "trained",
            "ModelPackageArn": str(job.settings.evaluate),
            "ModelPackageStatus": "Completed",
            "ModelPackageStatusDetails": {"ValidationStatuses": []},
            "CreationTime": EPOCH,
            "InferenceSpecification": {
                "Containers": [
                    {"BaseModel": {"HubContentName": str(job.settings.model), "HubContentVersion": "1.0.0"}},
                ]
            },
        },
        "DescribeArtifact": lambda request: {"ArtifactArn": f"{arn}:{ACCOUNT}:artifact/0"},
        "ListPipelines": lambda request: {"PipelineSummaries": []},
        "CreatePipeline": lambda request: {"PipelineArn": f"{arn}:{ACCOUNT}:pipeline/mtrl"},
        "StartPipelineExecution": lambda request: {
            "PipelineExecutionArn": f"{arn}:{ACCOUNT}:pipeline/mtrl/execution/dry-run"
        },
        "CreateJob": lambda request: {"JobArn": f"{arn}:{ACCOUNT}:job/AgentRFT/{request['body']['JobName']}"},
        "DescribeJob": lambda request: {
            "JobArn": f"{arn}:{ACCOUNT}:job/AgentRFT/{request['body']['JobName']}",
            **request["body"],
        },
    }


def specification(job: ManagedJob) -> dict[str, Any]:
    """Return the hub's file of hyperparameters, built from the tables of `hyperparameters`."""
    if job.evaluates:
        return {name: {"default": None} for name in hyperparameters.EVALUATION}
    kinds: dict[type, str] = {int: "integer", float: "float", str: "string"}
    return {
        entry.name: {
            "default": entry.default,
            **({"type": kinds[type(entry.default)]} if type(entry.default) in kinds else {}),
            **({"min": entry.low, "max": entry.high} if entry.high is not None else {}),
            **({"enum": list(entry.words)} if entry.words else {}),
        }
        for entry in hyperparameters.TABLE
    }
