"""SageMaker's managed multi-turn RL: python scripts/launch_managed_rl.py --help"""

from mtrl.sagemaker.managed import main

if __name__ == "__main__":
    main()
