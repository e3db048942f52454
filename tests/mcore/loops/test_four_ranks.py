"""Loops of four ranks whose groups are made anew."""

import pytest

pytestmark = pytest.mark.everything

RANKS = 4


def test_links_speak_again_where_groups_were_made_anew(answers) -> None:
    """Twice all groups but the world, then the world, and with it groups of ours: two ranks that
    first speak make a communicator, which is no work for the midst of a plan."""
    found = [answer["groups made anew"] for answer in answers]
    assert max(one["worst"] for one in found) < 1e-12
    assert all(one["losses equal"] and one["plans"] == 4 for one in found)
    assert [one["late"] for one in found] == [0] * 4
