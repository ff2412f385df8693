"""Many ranks as one program: who is there, how they are called, how models are shared out."""
