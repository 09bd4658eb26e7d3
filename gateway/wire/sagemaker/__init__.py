"""The SageMaker dialect: what Amazon's training-session SDK speaks, mounted at ``/sagemaker``.

Two services of botocore lie below it: ``sagemaker`` (the control plane: one path, JSON 1.1) and
``sagemakertrainingsessionruntime`` (REST with JSON bodies). Paths, shapes and limits are read from their models.
"""
