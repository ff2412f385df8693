"""SageMaker's managed multi-turn RL: python scripts/launch_managed_rl.py --help"""

from mtrl.sagemaker.launch_managed import main

if __name__ == "__main__":
    main()
