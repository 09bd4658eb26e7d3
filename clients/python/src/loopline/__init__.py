"""Loopline: training and sampling of live LoRA sessions on a gateway, from plain Python.

Start at ``ServiceClient``. Calls that take long return an ``APIFuture`` at once: ``.result()`` it, or ``await`` it.
"""

from loopline._retry import RetryPolicy
from loopline.client import ServiceClient, SessionOptions
from loopline.errors import (
    ApiError,
    ClientStopped,
    Conflict,
    ConnectionFailed,
    Exhausted,
    Forbidden,
    IncompleteGradient,
    InvalidRequest,
    LooplineError,
    NotFound,
    OperationError,
    OutOfBudget,
    ResultMismatchError,
    ServerFault,
    Unauthenticated,
    Unavailable,
    is_retryable,
)
from loopline.futures import APIFuture
from loopline.results import (
    Estimate,
    EstimateLine,
    ForwardBackwardOutput,
    LoadStateResponse,
    ModelPackage,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SaveStateResponse,
    SaveWeightsResponse,
    Session,
    StopReason,
    TokenLogprob,
    Usage,
    UsageLine,
    Verification,
)
from loopline.sampling import SamplingClient
from loopline.training import TrainingClient
from loopline.types import AdamParams, Datum, EncodedTextChunk, LossFn, ModelInput, SamplingParams, TensorData
from loopline.versions import Versions

__all__ = [
    "APIFuture",
    "AdamParams",
    "ApiError",
    "ClientStopped",
    "Conflict",
    "ConnectionFailed",
    "Datum",
    "EncodedTextChunk",
    "Estimate",
    "EstimateLine",
    "Exhausted",
    "Forbidden",
    "ForwardBackwardOutput",
    "IncompleteGradient",
    "InvalidRequest",
    "LoadStateResponse",
    "LooplineError",
    "LossFn",
    "ModelInput",
    "ModelPackage",
    "NotFound",
    "OperationError",
    "OptimStepResponse",
    "OutOfBudget",
    "ResultMismatchError",
    "RetryPolicy",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveStateResponse",
    "SaveWeightsResponse",
    "ServerFault",
    "ServiceClient",
    "Session",
    "SessionOptions",
    "StopReason",
    "TensorData",
    "TokenLogprob",
    "TrainingClient",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "UsageLine",
    "Verification",
    "Versions",
    "is_retryable",
]
