"""What a server has to do for the ``tinker`` SDK, its command line and its cookbook, and the tests that show it."""

from collections.abc import Mapping, Sequence

FIRST = "test_what_a_program_asks_first_is_answered_with_what_the_sdk_expects"
PIPELINED = "test_a_step_is_pipelined_and_its_outputs_are_in_order"
CHUNKS = "test_chunks_that_arrive_last_first_give_the_sum_of_all"
SPARSE = "test_alternatives_are_sent_sparse_and_scored_densely"
REPEATED = "test_repeating_a_request_changes_nothing"
SAMPLED = "test_a_saved_sampler_samples_and_scores"
FETCHED = "test_a_sample_is_computed_once_and_can_be_fetched_again"
NAMED = "test_a_named_checkpoint_is_sampled_by_its_path"
STATE = "test_a_state_is_loaded_into_the_same_and_into_a_new_model"
RUN = "test_a_run_is_listed_with_its_newest_checkpoints"
SCORED = "test_scores_are_those_of_the_model_also_under_an_adapter_on_the_unembedding"
GRADIENT = "test_a_custom_loss_moves_the_weights_where_plain_torch_moves_them"
FORWARD = "test_a_forward_pass_leaves_no_gradient_and_a_failed_result_says_whose_fault_it_is"
WAITING = "test_a_result_that_is_not_there_yet_says_why_and_is_asked_for_again_in_time"
POLICY = "test_a_policy_loss_arrives_with_its_inputs_and_settings_and_spans_are_tolerated"
CLI = "test_the_command_line_lists_describes_keeps_downloads_and_deletes"

CHECKLIST: Mapping[str, Sequence[str]] = {
    # every program
    "1 client/config": (FIRST,),
    "2 client/dynamic_config": (FIRST,),
    "3 create_session": (FIRST, "test_a_session_lists_what_it_opened"),
    "4 heartbeat, telemetry, finish": (FIRST, "test_a_finished_program_is_told_to_stop"),
    "5 X-API-Key": ("test_a_stranger_finds_nothing", "test_a_key_for_inference_does_not_train"),
    "6 refusals with a body": (
        "test_a_bad_batch_is_refused_by_place",
        "test_what_has_no_answer_here_is_refused_for_good",
    ),
    "7 retrieve_future": (WAITING, FETCHED, FORWARD, REPEATED),
    "8 idempotency by sequence keys": (REPEATED, FETCHED, "test_a_number_names_one_loss_for_good"),
    # fine-tuning
    "9 create_model, get_info": ("test_a_model_is_described_as_it_was_asked_for",),
    "10 batches in protobuf": (PIPELINED, SPARSE, "test_a_message_has_the_sdks_fields"),
    "11 cross_entropy": (PIPELINED, SPARSE, "test_value_and_gradient_equal_the_formula"),
    "12 forward_only": (FORWARD,),
    "13 accumulation, AdamW": (CHUNKS, GRADIENT, "test_the_six_fields_of_a_step_arrive_and_have_the_sdks_defaults"),
    "14 order": (CHUNKS, "test_a_rejected_seq_blocks_nobody", PIPELINED),
    "15 large batches": (CHUNKS, "test_a_request_of_more_than_five_megabytes_is_taken"),
    # reinforcement learning
    "16 samplers": (SAMPLED, NAMED, "test_a_base_model_is_sampled_without_training"),
    "17 samplers/{id}": (NAMED, "test_a_session_lists_what_it_opened"),
    "18 asample": (
        SAMPLED,
        FETCHED,
        "test_four_hundred_samples_at_once_are_each_answered_by_the_version_they_were_pinned_to",
    ),
    "19 policy losses": (POLICY, "test_a_loss_without_a_formula_is_refused_with_those_to_use"),
    "20 snapshots": ("test_an_inflight_sampler_follows_and_a_snapshot_stays",),
    "21 429 for overload": ("test_every_dialect_says_when_to_come_back",),
    # saving and loading
    "22 save_weights": (STATE, "test_a_name_is_taken_once_unless_it_is_to_be_overwritten"),
    "23 load_weights": (STATE,),
    "24 a resumed run": ("test_a_resumed_run_is_the_uninterrupted_one",),
    "25 training_runs/{id}": (RUN,),
    # sampling
    "26 scores of prompts": (SCORED, "test_the_last_prompt_positions_alone_are_scored_when_asked_so"),
    "27 stops, seeds, temperatures": (
        "test_what_bounds_a_sample_means_what_it_means_to_the_sdk",
        "test_temperatures_scale_what_is_sampled",
    ),
    "28 trainer and sampler agree": (
        "test_sampled_tokens_at_temperature_one_have_the_log_probabilities_that_the_trainer_computes",
    ),
    # custom losses
    "29 negative weights": (GRADIENT, "test_a_custom_loss_steps_on_its_own_gradient"),
    # the command line
    "30 lists": (CLI, RUN, "test_checkpoints_are_listed_by_kind_and_unnamed_ones_are_not"),
}
