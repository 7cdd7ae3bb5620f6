"""What people do with checkpoints outside of a job: look, check, compare, take out; without click or rich."""
