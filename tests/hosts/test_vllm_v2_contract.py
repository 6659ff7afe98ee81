"""What the V2 speculator takes for granted of vLLM, held against vLLM's source."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from fastdraft.serving.vllm.speculator import _WARM_UP, FastdraftSpeculator
from vllm_source import body, drafts_ngrams_on_v2, module, parameters, says, sources

GPU = "v1/worker/gpu"
RUNNER = f"{GPU}/model_runner.py"


@pytest.fixture(
    params=[source for source in sources() if drafts_ngrams_on_v2(source)],
    ids=lambda path: path.parent.name,
)
def source(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def runner(source: Path) -> ast.AST:
    return body(module(source, RUNNER), "GPUModelRunner")


def test_the_ngram_speculator_is_imported_when_it_is_made(source: Path) -> None:
    """So what stands in the module then is made, with these operands."""
    make = body(module(source, f"{GPU}/spec_decode/__init__.py"), "init_speculator")
    branch = next(
        node
        for node in ast.walk(make)
        if isinstance(node, ast.If) and "use_ngram()" in ast.unparse(node.test)
    )
    imported, made = branch.body
    assert isinstance(imported, ast.ImportFrom)
    assert imported.module == "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
    assert ast.unparse(made) == "return NgramGPUSpeculator(vllm_config, device, req_states)"
    assert says(runner(source), "self.speculator = init_speculator(self.vllm_config, self.device, "
                "self.req_states)")  # fmt: skip


def test_vllm_has_no_registry_of_speculators(source: Path) -> None:
    """Where it gets one, the speculator is to be registered there, and the plugin to be simpler."""
    for name in ("__init__.py", "speculator.py"):
        text = (source / GPU / "spec_decode" / name).read_text(encoding="utf-8").lower()
        assert "register" not in text
        assert "registry" not in text


def test_propose_has_the_parameters_of_vllms(source: Path) -> None:
    base = body(module(source, f"{GPU}/spec_decode/speculator.py"), "BaseSpeculator")
    theirs = parameters(body(base, "propose"))
    ours = list(inspect.signature(FastdraftSpeculator.propose).parameters)
    assert ours == [*theirs, "head_ids", "_"]
    abstract = {
        node.name
        for node in ast.walk(base)
        if isinstance(node, ast.FunctionDef)
        and any("abstractmethod" in ast.unparse(each) for each in node.decorator_list)
    }
    assert abstract == {"init_cudagraph_manager", "capture", "propose"}


def test_propose_gets_rows_and_counts_behind_the_texts(source: Path) -> None:
    sample = body(runner(source), "sample_tokens")
    text = ast.unparse(sample)
    assert text.index("self.postprocess_sampled(") < text.index("self.speculator.propose(")
    (call,) = [
        node
        for node in ast.walk(sample)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.speculator.propose"
    ]
    given = [ast.unparse(each) for each in call.args]
    assert given[:1] == ["input_batch"]
    assert given[5:8] == [
        "num_sampled",
        "num_rejected",
        "self.req_states.last_sampled_tokens",
    ]
    # A row of it is copied at once, so that the memory may be written at the next step.
    assert says(sample, "self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens")
    update = ast.unparse(body(runner(source), "postprocess_sampled"))
    assert "self.req_states.all_token_ids.gpu" in update
    assert "self.req_states.total_len.gpu" in update
    batch = body(module(source, f"{GPU}/input_batch.py"), "InputBatch")
    names = {
        node.target.id
        for node in batch.body  # type: ignore[union-attr]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {"num_reqs", "idx_mapping", "idx_mapping_np", "num_draft_tokens_per_req"} <= names


def test_heads_draft_before_lookups_join_them(source: Path) -> None:
    """The speculator is called through its instance, and says whether its drafts are drawn."""
    base = body(module(source, f"{GPU}/spec_decode/speculator.py"), "DraftModelSpeculator")
    assert says(body(base, "__init__"), "self.draft_logits: torch.Tensor | None = None")
    assert "self.draft_sample_method" not in ast.unparse(base)
    made = ast.unparse(body(runner(source), "__init__"))
    assert made.index("self.req_states = RequestState(") < made.index("init_speculator(")


def test_texts_stay_where_they_are(source: Path) -> None:
    states = body(module(source, f"{GPU}/states.py"), "RequestState")
    made = ast.unparse(body(states, "__init__"))
    for name, size in (
        ("all_token_ids", "(self.max_num_reqs, self.max_model_len)"),
        ("total_len", "self.max_num_reqs"),
    ):
        assert f"self.{name} = StagedWriteTensor({size}, dtype=torch.int32, device=device" in made
    assert "self.max_num_reqs = self.scheduler_config.max_num_seqs" in ast.unparse(
        body(runner(source), "__init__")
    )
    # On the device, not in the host's memory.
    assert "self.speculative_config.use_ngram()" in ast.unparse(body(runner(source), "__init__"))
    assert parameters(body(states, "add_request"))[:4] == [
        "self",
        "req_id",
        "prompt_len",
        "all_token_ids",
    ]


def test_requests_are_added_and_finished_by_these(source: Path) -> None:
    made = runner(source)
    execute = ast.unparse(body(made, "execute_model"))
    assert execute.index("self.finish_requests(scheduler_output)") < execute.index(
        "self.add_requests(scheduler_output)"
    )
    add = body(made, "add_requests")
    assert "in scheduler_output.scheduled_new_reqs" in ast.unparse(add)
    assert says(add, "req_index = self.req_states.req_id_to_index[req_id]")
    finish = ast.unparse(body(made, "finish_requests"))
    assert "scheduler_output.finished_req_ids" in finish
    assert "scheduler_output.preempted_req_ids" in finish
    data = body(module(source, "v1/core/sched/output.py"), "NewRequestData")
    names = {
        node.target.id
        for node in data.body  # type: ignore[union-attr]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {
        "lora_request",
        "prefill_token_ids",
        "prompt_is_token_ids",
        "prompt_token_ids",
        "req_id",
        "sampling_params",
    } <= names
    # Requests that were preempted come as new ones.
    scheduler = (source / "v1/core/sched/scheduler.py").read_text(encoding="utf-8")
    assert "scheduled_new_reqs.extend(scheduled_resumed_reqs)" in scheduler


def test_requests_that_warm_up_have_these_names(source: Path) -> None:
    text = (source / GPU / "warmup.py").read_text(encoding="utf-8")
    assert 'f"_warmup_{i}_"' in text
    assert 'req_id_prefix: str = "_v2_mixed_warmup"' in text
    assert _WARM_UP == ("_warmup_", "_v2_mixed_warmup_")


def test_convolutions_on_a_cpu_keep_rejected_tokens(source: Path) -> None:
    """Why hybrid models are refused. Where vLLM has mended it, they are to be tried again."""
    kernels = module(source, "model_executor/layers/mamba/ops/cpu/causal_conv1d.py")
    update = body(kernels, "causal_conv1d_update_cpu")
    assert "num_accepted_tokens" not in ast.unparse(update)
    mixer = ast.unparse(module(source, "model_executor/layers/mamba/mamba_mixer2.py"))
    assert "num_accepted_tokens=num_accepted_tokens" in mixer


def test_ranks_can_share_drafts(source: Path) -> None:
    groups = module(source, "distributed/parallel_state.py")
    broadcast = body(body(groups, "GroupCoordinator"), "broadcast")
    assert parameters(broadcast) == ["self", "input_", "src"]


def test_asynchronous_scheduling_takes_the_method(source: Path) -> None:
    speculative = module(source, "config/speculative.py")
    assert says(speculative, "NgramGPUTypes = Literal['ngram_gpu']")
    config = ast.unparse(body(module(source, "config/vllm.py"), "VllmConfig"))
    assert ".method not in get_args(NgramGPUTypes)" in config


def test_chances_are_taken_by_adaptive_verification(source: Path) -> None:
    made = runner(source)
    start = ast.unparse(body(made, "initialize_kv_cache"))
    assert "getattr(self.speculator, 'enable_adaptive_verification', False)" in start
    sample = ast.unparse(body(made, "sample_tokens"))
    assert (
        "self.adaptive_verification.record_confidences("
        "self.speculator.draft_token_confidence_probs, input_batch)" in sample
    )
    adaptive = module(source, f"{GPU}/spec_decode/adaptive_verification.py")
    manager = ast.unparse(adaptive)
    # Of each token where those before it are right: the product is what it survives with.
    assert "np.cumprod(stale_confidences" in manager
    assert "confidence_probs[:num_reqs]" in manager
    config = ast.unparse(body(module(source, "config/vllm.py"), "VllmConfig"))
    assert "Adaptive verification is not currently compatible with LoRA" in config


def test_lengths_of_drafts_are_named_before_graphs_are_chosen(source: Path) -> None:
    """In the one place where vLLM knows its runner, and has not looked at the lengths yet."""
    config = body(module(source, "config/vllm.py"), "VllmConfig")
    text = ast.unparse(body(config, "__post_init__"))
    given = text.index("self._maybe_disable_dynamic_sd_for_data_parallel()")
    assert given < text.index("self._maybe_override_dynamic_sd_cudagraph_mode()")
    assert given < text.index("self._set_cudagraph_sizes()")
    assert "uses_dynamic_speculative_decoding" not in text
    assert parameters(body(config, "_maybe_disable_dynamic_sd_for_data_parallel")) == ["self"]
    scheduler = body(module(source, "v1/core/sched/scheduler.py"), "Scheduler")
    assert "self.dynamic_sd_lookup[len(num_scheduled_tokens)]" in ast.unparse(scheduler)
    # Graphs of each length that is named, none at all included.
    graphs = (source / GPU / "cudagraph_utils.py").read_text(encoding="utf-8")
    assert "for num_spec in dense_schedule[1:]" in graphs
