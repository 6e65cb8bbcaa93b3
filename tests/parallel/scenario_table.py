"""Which scenarios there are: every method and variant with every feature that applies to it, by name alone.

pytest collects from here without importing a framework. A new scenario function is one more name in a list below; the
functions are in the module that a `TABLES` entry is called after, which worker.py compares with its entry.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horovod_quant.schemes import registry

OWN = {next(iter(registry.families_of(kind))): kind for kind in registry.own()}
"""The package's schemes, by the first of their short names."""

METHODS = list(OWN)
BINSGDM = ["binsgdm"]
OTHERS = [method for method in METHODS if method not in BINSGDM]
ON_DEVICES = [method for method, kind in OWN.items() if not kind.host_only]
"""Those with kernels of TensorFlow's operations, and for GPUs."""

TORCH_VARIANTS = [
    "qsgdinf",
    "qsgd-elias",
    "qsgd-alltoall",
    "nuqsgd-omega",
    "global-qsgd-l2",
    "global-qsgd-16",
    "global-qsgd-exponential",
    "global-qsgd-rotated",
    "eden-alltoall",
    "eden-trellis",
    "binsgdm-average",
]
AVERAGING = ["binsgdm-average"]
"""Of the variants those of BinSGDM."""
TORCH_GPU_VARIANTS = [
    "qsgdinf",
    "qsgd-alltoall",
    "global-qsgd-exponential",
    "eden-alltoall",
    "eden-trellis",
    "binsgdm-average",
]
TF_VARIANTS = ["nuqsgd-alltoall" if name == "qsgd-alltoall" else name for name in TORCH_VARIANTS]
IN_TENSORFLOW = [
    f"{name}-in-tensorflow"
    for name in (
        *ON_DEVICES,
        "nuqsgd-alltoall",
        "global-qsgd-exponential",
        "eden-trellis",
        "binsgdm-average",
    )
]


def makers(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a compressor with each of `METHODS`, from the frontend's classes by name."""
    return {
        name: functools.partial(kinds[kind.__name__], **registry.families_of(kind)[name])
        for name, kind in OWN.items()
    }


class Part(NamedTuple):
    """Each of the methods with each of the features; without methods, the features alone."""

    methods: Sequence[str]
    features: Sequence[str]
    extra: bool = False
    """Variants of methods and kernels, which not every launch of --all has."""

    def names(self) -> list[str]:
        if not self.methods:
            return list(self.features)
        return [f"{feature}-{method}" for method in self.methods for feature in self.features]


class Table(NamedTuple):
    """A module's scenarios."""

    parts: Sequence[Part]
    """In the order in which a launch runs them."""
    core: Sequence[str] = ()
    """Features that are tried wherever a launch is worth its start."""
    slow: Sequence[str] = ()
    """Features that take a launch under MPI with three workers too long."""
    in_pairs: Sequence[str] = ()
    """Features that by default are tried with two workers alone, for they are about what each worker does by itself."""
    also: Sequence[str] = ()
    """Further modules, whose scenarios are all in this table."""
    borrows: Sequence[str] = ()
    """Further modules, of whose scenarios some are."""
    sampled: Sequence[str] = ()
    """Methods that meet only some features by default, for each costs too much: variants with another sibling."""
    dear: Sequence[str] = ()
    """Features that take several times as long as others: by default what any feature would do is tried with others."""


TORCH = Table(
    [
        Part(
            METHODS,
            [
                "average",
                "a_large_gradient",
                "op_sum",
                "predivide",
                "a_factor_that_changes",
                "backward_passes",
                "num_groups",
                "explicit_groups",
                "groups_of_half_precision",
                "clipping",
                "unnamed_parameters",
                "unused_parameters",
                "hook_order_differs",
                "unnamed_allreduce_before_step",
                "grad_scaler",
                "gradients_are_let_go",
                "channels_last",
                "sparse_gradients",
                "sparse_as_dense",
                "two_optimizers",
                "two_optimizers_of_one_model",
                "a_frozen_copy_on_one_worker",
                "one_compressor_for_two_models",
                "threads",
                "forked_processes",
                "empty_parameters",
                "dtypes",
                "overrides_and_excluded",
                "overlap_with_a_slow_rank",
                "overlap_with_operations_in_the_backward_pass",
                "overlap_follows_up",
                "overlap_with_any_order",
                "overlap_with_parts_left_out",
                "overlap_is_real",
                "overlap_switched_off",
                "several_backward_passes_in_a_step",
                "checkpointed_layers",
                "a_model_that_changes",
                "a_worker_skips_its_backward_pass",
                "a_worker_has_a_batch_less",
                "operations_after_giving_up",
                "any_script",
                "a_worker_does_not_reach_the_second_optimizer",
                "first_together_after_training_apart",
                "an_operation_on_either_side_of_the_step",
                "optimizers_in_another_order",
                "parameters_in_another_order",
                "a_compressor_that_hands_on",
                "unnamed_tensors_of_other_shapes",
                "goes_on_after_tensors_that_differ",
                "frozen_layers",
                "one_tensor_twice_in_a_group",
                "copies_keep_their_names",
                "a_first_step_without_a_pass",
                "shapes_that_differ",
                "fresh_names",
                "more_names_than_are_remembered",
                "it_says_what_it_waits_for",
                "nan_on_one_rank",
                "direct_calls",
                "integers_pass_through",
                "integers_on_some_workers",
                "explicit_names",
                "survives_pickling",
                "another_default_device",
                "bad_arguments",
                "workers_disagree",
                "another_wire_format",
                "resuming_gives_the_same_bits",
            ],
        ),
        Part(["global-qsgd", "eden", *BINSGDM], ["compiled_functions"]),  # minutes with all methods
        Part(
            BINSGDM,
            ["binsgdm_state", "binsgdm_steps_that_are_left_out", "binsgdm_groups_schedules_and_clipping"],
        ),
        Part(AVERAGING, ["binsgdm_moves_by_averages", "grad_scaler", "resuming_gives_the_same_bits"]),
        Part(
            [],
            [
                "auto_tries_all_and_all_choose_alike",
                "auto_is_horovod_itself_where_nothing_pays",
                "auto_knows_a_choice_from_one_worker",
                "auto_where_horovod_waits_for_no_gradient",
                "auto_in_any_script",
                "auto_with_values_that_are_not_finite",
                "auto_while_the_model_changes",
                "auto_with_a_frozen_copy_on_one_worker",
                "auto_with_two_optimizers_again_and_again",
                "auto_says_what_is_wrong",
            ],
        ),
        Part(
            TORCH_VARIANTS,
            ["average", "op_sum", "hook_order_differs", "overlap_with_any_order", "nan_on_one_rank"],
            extra=True,
        ),
        Part(
            ["global-qsgd-rotated"],
            ["sums_that_leave_their_fields", "resuming_gives_the_same_bits"],
            extra=True,
        ),
        # Last, because workers outside the process set, and those that have joined, start fewer operations, and a
        # later unnamed one would hang, with Horovod alone as well.
        Part(METHODS, ["workers_that_join", "training_goes_on_after_joining"]),
        Part([], ["auto_among_workers_that_join"]),
        Part(TORCH_VARIANTS, ["workers_that_join", "training_goes_on_after_joining"], extra=True),
        Part(
            METHODS,
            ["process_set", "process_sets_train_different_models", "unnamed_beside_a_process_set"],
        ),
        Part(["global-qsgd-rotated"], ["process_set"], extra=True),
    ],
    core=["average", "overlap_with_any_order", "direct_calls", "several_backward_passes_in_a_step"],
    in_pairs=[
        "compiled_functions",
        "auto_is_horovod_itself_where_nothing_pays",
        "auto_where_horovod_waits_for_no_gradient",
        "auto_with_values_that_are_not_finite",
        "auto_while_the_model_changes",
        "auto_says_what_is_wrong",
    ],
    also=["torch_scripts", "torch_auto"],
    sampled=TORCH_VARIANTS,
    dear=[
        "a_large_gradient",
        "any_script",
        "compiled_functions",
        "overlap_with_any_order",
        "workers_that_join",
    ],
)

TF = Table(
    [
        Part(
            METHODS,
            [
                "keras_fit",
                "keras_legacy_optimizer",
                "keras_run_eagerly",
                "keras_legacy_run_eagerly",
                "keras_module_of_its_own",
                "keras_optimizer_from_horovod_tensorflow",
                "keras_sum",
                "keras_groups",
                "keras_backward_passes",
                "keras_mixed_precision",
                "keras_loads_models",
                "checkpoints_are_restored",
                "tape_in_a_function",
                "tape_eager",
                "tape_generic_names",
                "tape_sum",
                "tape_predivide",
                "tape_groups",
                "tape_dtypes",
                "overrides_and_excluded",
                "names_of_ones_own",
                "local_and_unused_variables",
                "one_gradient_for_two_variables",
                "watched_tensors",
                "a_compressor_that_delegates",
                "embedding_in_fit",
                "sparse_gradients",
                "graph_and_session",
                "direct_calls",
                "scale_factors",
                "integers_pass_through",
                "integers_on_some_workers",
                "shapes_that_differ",
                "fresh_names",
                "dynamic_shapes",
                "nan_on_one_rank",
                "training_under_check_numerics",
                "constant_gradients",
                "gradients_of_unknown_rank",
                "survives_pickling",
                "copies_keep_names",
                "two_models",
                "bad_arguments",
                "workers_disagree",
                "resuming_gives_the_same_bits",
                "counts_that_differ",
                "a_worker_that_joins",
            ],
        ),
        Part(
            OTHERS,
            [
                "subnormal_numbers",
                "differentiation_is_refused",
                "measured_nmse",
                "keras_equal_models_in_one_step",
            ],
        ),
        Part([name for name in METHODS if name in ON_DEVICES], ["saved_models_train_on"]),
        Part([], ["gradients_one_by_one_are_told"]),
        Part(
            ["qsgd", "eden-in-tensorflow", "global-qsgd-in-tensorflow"], ["an_error_while_data_are_awaited"]
        ),
        Part(BINSGDM, ["binsgdm_moves_by_the_rate", "binsgdm_and_zero_gradients"]),
        Part(AVERAGING, ["binsgdm_moves_by_averages", "binsgdm_and_zero_gradients", "keras_mixed_precision"]),
        Part(
            TF_VARIANTS,
            [
                "tape_in_a_function",
                "tape_groups",
                "dynamic_shapes",
                "nan_on_one_rank",
                "training_under_check_numerics",
                "counts_that_differ",
            ],
            extra=True,
        ),
        Part(["global-qsgd-rotated"], ["sums_that_leave_their_fields"], extra=True),
        Part(
            IN_TENSORFLOW,
            [
                "keras_fit",
                "tape_groups",
                "tape_dtypes",
                "direct_calls",
                "nan_on_one_rank",
                "constant_gradients",
                "graph_and_session",
            ],
            extra=True,
        ),
        Part(
            [name for name in IN_TENSORFLOW if not name.startswith("binsgdm")],
            ["dynamic_shapes", "resuming_gives_the_same_bits", "subnormal_numbers", "measured_nmse"],
            extra=True,
        ),
        Part(
            ["global-qsgd-in-tensorflow"],
            ["shapes_that_differ", "fresh_names", "scale_factors"],
            extra=True,
        ),
        Part(
            ["global-qsgd-in-tensorflow", "binsgdm-in-tensorflow"],
            [
                "keras_loads_models",
                "checkpoints_are_restored",
                "one_gradient_for_two_variables",
                "keras_legacy_run_eagerly",
                "keras_backward_passes",
                "keras_mixed_precision",
                "overrides_and_excluded",
                "workers_disagree",
                "a_worker_that_joins",
            ],
            extra=True,
        ),
        Part(
            ["binsgdm-in-tensorflow"],
            ["binsgdm_moves_by_the_rate", "binsgdm_and_zero_gradients"],
            extra=True,
        ),
        Part(
            ["binsgdm-average-in-tensorflow"],
            ["binsgdm_moves_by_averages", "keras_loads_models", "checkpoints_are_restored"],
            extra=True,
        ),
        Part(["eden-in-tensorflow"], ["counts_that_differ"], extra=True),  # whose steps are sent along
        # Last, because workers outside the process set take no part in its operations.
        Part(METHODS, ["keras_process_set", "tape_process_set"]),
    ],
    core=["keras_fit", "tape_groups", "direct_calls", "nan_on_one_rank"],
    slow=[
        "binsgdm_moves_by_the_rate",
        "keras_backward_passes",
        "keras_groups",
        "keras_loads_models",
        "keras_mixed_precision",
        "keras_module_of_its_own",
        "one_gradient_for_two_variables",
        "survives_pickling",
        "tape_dtypes",
    ],
    in_pairs=[
        "keras_fit",
        "keras_sum",
        "keras_legacy_optimizer",
        "keras_run_eagerly",
        "keras_legacy_run_eagerly",
        "keras_optimizer_from_horovod_tensorflow",
        "checkpoints_are_restored",
        "saved_models_train_on",
        "tape_eager",
        "tape_generic_names",
        "names_of_ones_own",
        "local_and_unused_variables",
        "watched_tensors",
        "a_compressor_that_delegates",
        "embedding_in_fit",
        "graph_and_session",
        "training_under_check_numerics",
        "constant_gradients",
        "gradients_of_unknown_rank",
        "copies_keep_names",
        "two_models",
        "fresh_names",
        "scale_factors",
        "integers_pass_through",
        "overrides_and_excluded",
        "subnormal_numbers",
        "differentiation_is_refused",
        "keras_equal_models_in_one_step",
        "gradients_one_by_one_are_told",
        "an_error_while_data_are_awaited",
        "bad_arguments",
    ],
    also=["tf_calls"],
    sampled=[*TF_VARIANTS, *IN_TENSORFLOW],
    dear=[
        "keras_fit",
        "keras_run_eagerly",
        "keras_legacy_run_eagerly",
        "keras_mixed_precision",
        "keras_backward_passes",
        "keras_loads_models",
        "checkpoints_are_restored",
        "saved_models_train_on",
        "tape_dtypes",
        "direct_calls",
        "training_under_check_numerics",
        "resuming_gives_the_same_bits",
        "workers_disagree",
        "binsgdm_moves_by_the_rate",
    ],
)

TORCH_HIERARCHICAL = Table(
    [
        Part(
            [],
            [
                "a_tensor_smaller_than_the_node",
                "what_travels_inside",
                "auto_between_nodes",
                "nodes_of_one_worker",
                "nodes_that_do_not_fit",
                "a_process_set",
                "too_few_bits_for_the_nodes",
                "the_state_of_binsgdm_is_shared_out",
                "the_state_of_binsgdm_is_gathered_saved_and_loaded",
                "the_state_of_a_small_tensor_is_gathered",
            ],
        ),
        Part(
            METHODS,
            [
                "average",
                "a_large_gradient",
                "op_sum",
                "backward_passes",
                "groups_of_half_precision",
                "unused_parameters",
                "hook_order_differs",
                "dtypes",
                "overrides_and_excluded",
                "overlap_with_a_slow_rank",
                "overlap_with_any_order",
                "overlap_with_parts_left_out",
                "overlap_is_real",
                "several_backward_passes_in_a_step",
                "nan_on_one_rank",
                "direct_calls",
                "shapes_that_differ",
                "resuming_gives_the_same_bits",
            ],
        ),
        Part(BINSGDM, ["binsgdm_groups_schedules_and_clipping"]),
        Part(TORCH_VARIANTS, ["average", "overlap_with_any_order", "nan_on_one_rank"], extra=True),
        # Last: who has joined has started fewer operations, and a later unnamed one would hang, with Horovod alone as
        # well.
        Part(METHODS, ["a_worker_that_joins"]),
        Part([], ["a_worker_that_joins_before_the_first_step"]),
    ],
    core=[
        "direct_calls",
        "the_state_of_binsgdm_is_gathered_saved_and_loaded",
    ],  # with one worker Horovod asks for no compression of gradients
    borrows=["torch_scenarios", "torch_scripts"],
)

OF_BINSGDM = [
    "the_state_of_binsgdm_is_shared_out",
    "the_state_of_binsgdm_is_gathered_saved_and_loaded",
    "the_state_of_binsgdm_survives_the_broadcast",
]
NOT_OF_BINSGDM = ["a_tensor_smaller_than_the_node", "what_travels_inside", "dynamic_shapes"]
TF_HIERARCHICAL = Table(
    [
        Part(OTHERS, NOT_OF_BINSGDM),
        Part(BINSGDM, OF_BINSGDM),
        Part(METHODS, ["keras_fit", "tape_groups", "tape_dtypes", "direct_calls", "nan_on_one_rank"]),
        Part([name for name in IN_TENSORFLOW if not name.startswith("binsgdm")], NOT_OF_BINSGDM),
        Part(["binsgdm-in-tensorflow"], OF_BINSGDM),
        Part(IN_TENSORFLOW, ["tape_groups", "tape_dtypes", "constant_gradients"]),
        Part([name for name in TF_VARIANTS if name not in AVERAGING], NOT_OF_BINSGDM, extra=True),
        Part(AVERAGING, [*OF_BINSGDM, "tape_groups"], extra=True),
    ],
    core=["keras_fit", "tape_groups", *NOT_OF_BINSGDM, *OF_BINSGDM],
    sampled=[*TF_VARIANTS, *IN_TENSORFLOW],
    borrows=["tf_scenarios", "tf_calls"],
)

ON_A_GPU = [
    "overlapped",
    "grouped_by_horovod",
    "short_types",
    "hierarchical",
    "ranks_with_other_kernels",
    "read_before_results_come",
    "interrupted_while_decoding",
    "nan_on_one_rank",
    "direct_calls",
]
TORCH_GPU = Table(
    [
        Part(ON_DEVICES, ON_A_GPU),
        Part(TORCH_GPU_VARIANTS, ON_A_GPU, extra=True),
        # Last: after it a later unnamed operation of Horovod would hang.
        Part(ON_DEVICES, ["join_early"]),
        Part(TORCH_GPU_VARIANTS, ["join_early"], extra=True),
    ],
    core=["overlapped"],
)

TORCH_OTHER_RELEASE = Table([Part(METHODS, ["asks_for_names"]), Part(OTHERS, ["is_content_with_names"])])

KERAS = Table(
    [
        Part(
            METHODS,
            [
                "fit",
                "fit_in_groups",
                "fit_eagerly",
                "fit_several_steps_at_once",
                "fit_with_sum_and_predivide",
                "accumulation",
                "clipping_decay_and_averages_of_weights",
                "within_a_process_set",
                "steps_of_ones_own",
                "an_overflow_on_one_rank",
                "resuming_gives_the_same_bits",
                "models_made_on_one_rank_only",
                "two_optimizers_in_one_step",
            ],
        ),
        Part(
            ["global-qsgd-in-tensorflow", "eden-in-tensorflow"],
            ["fit", "accumulation", "an_overflow_on_one_rank", "resuming_gives_the_same_bits"],
        ),
        Part(
            [],
            [
                "plain_averages_equal_one_process",
                "sparse_gradients",
                "local_variables",
                "one_optimizer_is_applied_twice_in_a_step",
                "a_variable_without_a_gradient_is_known",
                "the_measured_sample_is_one_where_paths_differ",
                "the_state_of_binsgdm_on_a_node_is_shared_out",
                "the_first_variables_are_one_rank_s",
                "ranks_stop_early_together",
                "learning_rates",
                "xla_is_refused",
                "averaging_twice_is_refused",
                "bad_arguments",
                "workers_disagree",
            ],
        ),
        Part(
            [],
            [
                "models_built_on_some_ranks_only",
                "accumulated_gradients_of_shared_and_local_variables",
                "an_infinite_gradient_ends_with_its_accumulation",
                "local_layers_keep_their_gradients",
                "workers_outside_a_process_set_are_alone",
                "optimizers_made_from_a_configuration",
                "loaded_models_have_distributed_optimizers",
                "a_fit_without_epochs_broadcasts_what_one_rank_has_loaded",
                "a_warm_up_and_schedules_over_twenty_epochs",
                "frozen_layers_are_broadcast_and_local_ones_are_not",
                "elastic_states_are_synchronized_restored_and_committed",
            ],
        ),
    ],
    core=["fit", "accumulation", "an_overflow_on_one_rank", "plain_averages_equal_one_process"],
    also=["keras_upstream_scenarios"],
    sampled=["global-qsgd-in-tensorflow", "eden-in-tensorflow"],
)
"""Under Keras 3: scripts/test --latest."""

KERAS_2 = [
    "checkpoints_are_restored",
    "local_and_unused_variables",
    "one_gradient_for_two_variables",
    "survives_pickling",
    "copies_keep_names",
    "two_models",
    "bad_arguments",
    "workers_disagree",
]
"""Of tf_scenarios.py what uses optimizers of Keras 2, besides all that is called after Keras, and BinSGDM's."""


def without_keras_2(names: Sequence[str]) -> list[str]:
    """Of names of scenarios with TensorFlow those that can run under Keras 3."""
    return [
        name
        for name in names
        if not (name.startswith(("keras_", "binsgdm_")) or "-binsgdm" in name or split(name)[0] in KERAS_2)
    ]


TABLES = {
    "keras_scenarios": KERAS,
    "torch_scenarios": TORCH,
    "tf_scenarios": TF,
    "torch_hierarchical_scenarios": TORCH_HIERARCHICAL,
    "tf_hierarchical_scenarios": TF_HIERARCHICAL,
    "torch_gpu_scenarios": TORCH_GPU,
    "torch_other_release_scenarios": TORCH_OTHER_RELEASE,
}


def split(name: str) -> tuple[str, str]:
    """A scenario's feature and its method; "" where it has none."""
    feature, _, method = name.partition("-")
    return feature, method


def names(module: str, breadth: str) -> list[str]:
    """A module's scenarios: ``"full"``, with ``"extra"`` those of variants, too; ``"quick"``, all these but its
    ``slow`` ones; or its ``core`` alone.
    """
    table = TABLES[module]
    kept = [
        name
        for part in table.parts
        if breadth in ("extra", "quick") or not part.extra
        for name in part.names()
    ]
    if breadth == "core":
        kept = [name for name in kept if split(name)[0] in table.core]
    if breadth == "quick":
        kept = [name for name in kept if split(name)[0] not in table.slow]
    return kept


def problems(module: str, folder: Path) -> Iterator[str]:
    """What the module's own scenario functions, read without running them, and its table do not agree in."""
    table = TABLES[module]
    listed = {feature for part in table.parts for feature in part.features}
    written = [name for each in (module, *table.also) for name, _ in _functions(folder / f"{each}.py")]
    for name in written:
        if name not in listed:
            yield f"{module}: {name} is in no list of scenario_table.py, so nothing runs it"
    for name in {*table.core, *table.slow, *table.in_pairs, *table.dear} - listed:
        yield f"scenario_table.py: {module} has no feature {name!r}"
    every = names(module, "extra")
    for name in sorted(set(every)):
        if every.count(name) > 1:
            yield f"scenario_table.py: {module} has {name} more than once"


def _functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of a file that are scenarios: public, and called with nothing or with ``make`` alone."""
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        given = node.args
        required = [each.arg for each in given.args[: len(given.args) - len(given.defaults)]]
        helper = given.kwonlyargs or given.kwarg or given.vararg or node.name in ("start", "clean", "finish")
        if not helper and required in ([], ["make"]):
            yield node.name, node
