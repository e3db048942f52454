"""Actors of Ray for two ranks; fresh_environments.py runs this file next to a copy of a loop.

    ray_actors.py [NAME=VALUE] FOLDER     # a variable for the actors alone, as runtime_env gives it

As in verl, slime and others, all other variables reach the actors from the environment in which Ray
is started.
"""

import os
import socket
import sys
import tempfile
from pathlib import Path

import ray

STAGES = 2


@ray.remote(num_cpus=1)
class Rank:
    def __init__(self, rank: int, port: int):
        assert "torch" not in sys.modules, "what this shows is torch's import in an actor"
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(STAGES),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip

    def run(self, folder: str) -> None:
        import strangers_loop

        sys.argv = ["strangers_loop", folder]
        strangers_loop.main()


def main() -> None:
    *variables, folder = sys.argv[1:]
    given = {"PYTHONPATH": str(Path(__file__).parent)}
    given.update(one.split("=", 1) for one in variables)
    os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray") as session:
        ray.init(
            "local", num_cpus=STAGES, include_dashboard=False, runtime_env={"env_vars": given},
            object_store_memory=100 << 20, _temp_dir=session, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        ranks = [Rank.remote(rank, port) for rank in range(STAGES)]
        ray.get([rank.run.remote(folder) for rank in ranks])
        ray.shutdown()


if __name__ == "__main__":
    main()
