"""`python -m engine simulate`: what policies would do on a machine, and the papers' figures beside ours."""
