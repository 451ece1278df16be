"""Deployment: files that build images of a run and start them, for Docker, Compose, Kubernetes and three clouds.

`agl deploy` drives it. `project` reads what is deployed, `render` makes texts of it and writes them. It starts nothing and
knows no cloud's API: the files are their owner's from then on.
"""
