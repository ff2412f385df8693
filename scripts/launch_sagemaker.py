"""Train on SageMaker: python scripts/launch_sagemaker.py experiment=NAME sagemaker.role=ARN sagemaker.bucket=NAME"""

from mtrl.sagemaker.job import main

if __name__ == "__main__":
    main()
