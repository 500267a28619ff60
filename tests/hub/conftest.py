"""A hub and the commands that ask it, for all tests here."""

import pytest
from helpers.hub_commands import HubCommands
from helpers.hub_repositories import make_repositories
from helpers.hub_server import HubServer


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(make_repositories(folder / "repositories")) as hub:
        with HubCommands(hub, folder) as commands:
            yield commands


@pytest.fixture(autouse=True)
def _first(commands):
    """Begin with a hub that is well, and an empty cache."""
    commands.hub.reset()
    commands.empty_the_cache()
