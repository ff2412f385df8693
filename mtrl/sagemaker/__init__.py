"""Training on Amazon SageMaker: jobs that run mtrl, and the managed service for multi-turn RL.

No module here imports the SDK at module level. The code is written against sagemaker 3.27 (sagemaker-core 2.27,
sagemaker-train 1.27), and tested with its classes; no job was ever started on AWS.
"""
