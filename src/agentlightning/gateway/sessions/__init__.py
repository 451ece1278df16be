"""UserSessions: users of a served model, each conversation a rollout that keeps one version of the model."""
