"""A cache of Hydra's merges of the files under conf/, which are most of the time of `compose`.

Within `caching`, Hydra reads each file once in a process and merges these files once for each choice of groups, and
further compositions start from a copy. Of compositions with folders or packages of a user's own, only what is merged
before the first file from there is cached. Overrides of values are not cached. `tests/command/test_hydra_cache.py`
compares both.
"""

import copy
import pickle
from contextlib import contextmanager
from itertools import takewhile
from unittest import mock

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from omegaconf import flag_override
from omegaconf.errors import OmegaConfBaseException

from mtrl.config.overrides import CONF

OWN = {"hydra.conf", str(CONF), ""}  # the last are the dataclasses of the schema
"""The sources of every composition; the files in them do not change while tests run."""
FIRST = ("hydra/", "schema", "config")
"""Beginnings of the files that come first in every composition, and whose merge takes most of the time."""
CREATE = config_loader_impl.create_defaults_list
MERGE = ConfigLoaderImpl._compose_config_from_defaults_list
LOAD = ConfigRepository.load_config
DEFAULTS: dict = {}
MERGED: dict = {}
LOADED: dict = {}


def _load(self, config_path):
    """Return the content of a file or of a dataclass: a copy if it was read before."""
    sources = tuple(source.path for source in self.sources)
    if not OWN.issuperset(sources):
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.path not in OWN:
            return LOAD(self, config_path)
        sources = (source.provider, source.path)
    key = (sources, config_path)
    if key not in LOADED:
        LOADED[key] = pickle.dumps(LOAD(self, config_path))
    return pickle.loads(LOADED[key])


def _create(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    """Return the list of the files to merge, from the cache if only overrides of values differ."""
    arguments = {"prepend_hydra": prepend_hydra, "skip_missing": skip_missing}
    sources = tuple(source.path for source in repo.get_sources())
    if not OWN.issuperset(sources):
        return CREATE(repo, config_name, overrides_list, **arguments)
    values = Overrides(repo, overrides_list).config_overrides
    groups = tuple(override.input_line for override in overrides_list if override not in values)
    key = (sources, config_name, groups, *arguments.values())
    if key not in DEFAULTS:
        DEFAULTS[key] = CREATE(repo, config_name, overrides_list, **arguments)
    found = copy.copy(DEFAULTS[key])
    found.config_overrides = values
    return found


def _merge(self, defaults, repo):
    """Return the merged files: a copy if this list of files, which is from the cache, was merged before."""
    if not any(defaults is cached.defaults for cached in DEFAULTS.values()):
        return _go_on(self, defaults, repo, [*takewhile(lambda default: _is_own(repo, default.config_path), defaults)])
    if id(defaults) not in MERGED:
        first = [*takewhile(lambda default: default.config_path.startswith(FIRST), defaults)]
        MERGED[id(defaults)] = pickle.dumps(_go_on(self, defaults, repo, first))
    return pickle.loads(MERGED[id(defaults)])  # takes a fifth of the time of `copy.deepcopy`


def _go_on(self, defaults, repo, first):
    """Merge a list of files, of which the first ones are a copy if they were merged before."""
    key = tuple((default.config_path, default.package, default.parent, default.is_self) for default in first)
    if key not in MERGED:
        MERGED[key] = pickle.dumps(MERGE(self, first, repo))
    merged = pickle.loads(MERGED[key])
    try:
        with flag_override(merged, "no_deepcopy_set_nodes", True):
            for default in defaults[len(first) :]:
                merged.merge_with(self._load_single_config(default=default, repo=repo).config)
    except OmegaConfBaseException:
        return MERGE(self, defaults, repo)  # raises Hydra's error
    return merged


def _is_own(repo, config_path):
    """Return whether Hydra finds this file under conf/, in its own package or among the dataclasses of the schema."""
    return repo.load_config(config_path).path.rpartition("://")[2] in {path.rpartition("://")[2] for path in OWN}


@contextmanager
def caching():
    """Cache the merges of all compositions in this process."""
    with (
        mock.patch.object(ConfigRepository, "load_config", _load),
        mock.patch.object(config_loader_impl, "create_defaults_list", _create),
        mock.patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", _merge),
        # Hydra copies the store for each composition, and then each schema that it reads from the copy.
        mock.patch.object(ConfigStore, "__deepcopy__", lambda store, memo: store, create=True),
    ):
        yield
