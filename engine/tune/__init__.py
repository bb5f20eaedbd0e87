"""`python -m engine tune`: measure the machine, predict every setting through the simulator, play the best for real."""
