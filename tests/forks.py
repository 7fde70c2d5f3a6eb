"""Real processes, forked from one that has the imports behind it: a fresh interpreter spends seconds on them."""

from __future__ import annotations

import multiprocessing

METHOD = "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
IMPORTS = ["dapo_runner.loop", "dapo_runner.logging.report", "transformers.models.llama", "peft", "scipy.signal"]
IMPORTS += ["vllm.entrypoints.launchers.api_server.entry", "vllm.v1.worker.cpu_worker"]  # where it is installed
CONTEXT.set_forkserver_preload(IMPORTS)
