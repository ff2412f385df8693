"""One update of the policy and the critic."""
