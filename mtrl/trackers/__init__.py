"""Trackers as followers: the folder of a run is the source, and followers copy its new content to trackers."""

from mtrl.trackers.followers import Followers
from mtrl.trackers.start import check_trackers, mlflow_url, start_followers

__all__ = ["Followers", "check_trackers", "mlflow_url", "start_followers"]
