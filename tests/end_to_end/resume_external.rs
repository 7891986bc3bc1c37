//! Checks that the built-in runtime resumes from checkpoints of DeepSpeed with the losses that
//! DeepSpeed itself computed in its next steps.
use crate::support::resumed_job::{ResumedJob, locate_deepspeed_recording};
use std::fs;

#[test]
fn resumed_losses_equal_those_of_deepspeed() {
    for name in ["z2", "z3_tied"] {
        let resumed = ResumedJob::from_deepspeed(name);
        let mut bits = Vec::new();
        for (workers, stage) in [(1, 0), (2, 3), (3, 1), (4, 2)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(["checkpoint.every=never"]).collect();
            let ran = resumed.run(&set).expect_success();
            let event = ran.events_named("resume")[0];
            assert_eq!((&event["step"], &event["world"]), (&3.into(), &2.into()));
            resumed.assert_losses(&ran);
            let steps = ran.events_named("step");
            // the schedule is linear from 2e-3 at step 2 to 0 at step 20; three steps are done
            let lr = steps[0]["lr"].as_f64().unwrap();
            assert!((lr - 2e-3 * 17.0 / 18.0).abs() < 1e-12, "{lr}");
            if workers == 1 {
                resumed
                    .job_dir
                    .assert_snapshot(&format!("notices_{name}"), &ran.notice_messages().join("\n"));
            }
            bits.push(ran.collect_losses());
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "{name}: losses depend on the number of workers");
    }
}

/// Checks that a run resumes from a universal checkpoint that DeepSpeed's `ds_to_universal` wrote,
/// both directly and after a conversion to a native checkpoint.
#[test]
fn universal_checkpoints_resume_with_the_losses_of_deepspeed() {
    let mut resumed = ResumedJob::from_deepspeed("z2");
    let universal = locate_deepspeed_recording("z2_universal");
    let native = resumed.job_dir.path("native");
    let arguments =
        ["ckpt", "convert", universal.to_str().unwrap(), native.to_str().unwrap(), "--to", "native"];
    let converted = resumed.job_dir.run_launch(&arguments);
    assert!(converted.status.success(), "{}", String::from_utf8_lossy(&converted.stderr));
    for from in [universal, native] {
        resumed.from = from;
        for workers in [1, 3] {
            let workers = format!("cluster.workers_per_host={workers}");
            let ran = resumed.run(&[&workers, "checkpoint.every=never"]).expect_success();
            resumed.assert_losses(&ran);
        }
    }
}

/// Checks that a universal checkpoint that does not record which parameters belong to its two
/// groups can be converted and resumed.
#[test]
fn checkpoints_without_parameter_groups_are_converted_and_resumed() {
    let mut resumed = ResumedJob::from_deepspeed("z2");
    resumed.from = locate_deepspeed_recording("z2_universal");
    let open = resumed.copy_checkpoint_without(&["next.json"]);
    let other_writer =
        concat!(env!("CARGO_MANIFEST_DIR"), "/worker/ckpt/tests/golden/tiny/hybrid/global_step3_universal");
    let model = "mp_rank_00_model_states.pt";
    fs::copy(format!("{other_writer}/{model}"), open.join("global_step3_universal").join(model)).unwrap();
    let convert = |out: &str, to: &str, more: &[&str], code: i32| {
        let (from, out) = (open.display().to_string(), resumed.job_dir.path(out));
        let arguments = [&["ckpt", "convert", &from, out.to_str().unwrap(), "--to", to], more].concat();
        let ran = resumed.job_dir.run_launch(&arguments);
        let stderr = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!((ran.status.code(), out.exists()), (Some(code), code == 0), "{stderr}");
        (out, stderr)
    };
    let (native, stderr) = convert("native", "native", &[], 0);
    let mut messages = stderr;
    messages += &convert("out", "deepspeed", &[], 4).1;
    let norms = "--group=*norm*=1";
    for arguments in [
        &["--group=norm"][..],
        &["--group=*norm*=one"],
        &["--group=[=1"],
        &["--group=*norm*=2"],
        &[norms, "--group=*.bias=1"],
        &[norms, "--group=model.norm.*=1"],
    ] {
        messages += &convert("out", "deepspeed", arguments, 2).1;
    }
    messages += &convert("out", "safetensors", &[norms], 2).1;
    let (deepspeed, _) = convert("deepspeed", "deepspeed", &[norms, "--world=3"], 0);
    let known = resumed.job_dir.run_launch(&[
        "ckpt",
        "convert",
        deepspeed.to_str().unwrap(),
        "again",
        "--to=universal",
        norms,
    ]);
    assert_eq!(known.status.code(), Some(2));
    messages += &String::from_utf8_lossy(&known.stderr);
    resumed.job_dir.assert_snapshot("messages_about_groups", &messages);
    for from in [open.clone(), native, deepspeed] {
        resumed.from = from;
        for workers in [1, 3] {
            let workers = format!("cluster.workers_per_host={workers}");
            let ran = resumed.run(&[&workers, "checkpoint.every=never"]).expect_success();
            resumed.assert_losses(&ran);
            let name = extract_file_name(&resumed.from);
            if workers.ends_with("=1") {
                resumed
                    .job_dir
                    .assert_snapshot(&format!("notices_of_groups_{name}"), &ran.notice_messages().join("\n"));
            }
        }
    }
}

#[test]
fn differences_are_reported_and_mismatches_rejected() {
    let resumed = ResumedJob::from_deepspeed("z2");
    let ran = resumed.run(&[
        "train.optimizer.weight_decay=0.2",
        "train.optimizer.betas=[0.8,0.95]",
        "train.schedule.warmup_steps=3",
        "train.steps=4",
    ]);
    let mut messages = ran.notice_messages().join("\n");
    for change in [
        "train.model.intermediate_size=48",
        "train.model.num_hidden_layers=3",
        "train.model.num_hidden_layers=1",
        "train.model.tie_word_embeddings=true",
        "train.optimizer={name: sgd, lr: 0.1}",
    ] {
        let rejected = resumed.expect_rejection(&[change]);
        let failure = rejected.expect_failure();
        let (code, message) = (&failure["code"], failure["message"].as_str().unwrap());
        messages += &format!("\n{change}: {code}: {message}");
    }
    resumed.job_dir.assert_snapshot("differences_and_mismatches", &messages);
}

/// Checks that a run that resumed from DeepSpeed saves native checkpoints, and that resuming from
/// these gives the same bits.
#[test]
fn native_checkpoints_of_a_resumed_run_are_bit_equal() {
    let resumed = ResumedJob::from_deepspeed("z3_tied");
    let whole = resumed.run(&["train.steps=10"]).expect_success().collect_losses();
    resumed.run(&["train.steps=10", "train.zero.stage=1", "checkpoint.every=3"]).expect_success();
    let root = resumed.job_dir.checkpoint_dir();
    fs::remove_dir_all(root.join("step-00000010")).unwrap();
    let rest = resumed.job_dir.run(&["train.steps=10", "cluster.workers_per_host=3"]).expect_success();
    assert_eq!(rest.events_named("resume")[0]["step"], 9);
    assert_eq!(rest.collect_losses(), whole[6..]);
    // a run that resumes at its last step still saves a native checkpoint
    let ended = resumed.run(&["train.steps=3", "train.schedule.warmup_steps=2"]).expect_success();
    assert_eq!(ended.events_named("checkpoint").len(), 1, "{}", ended.stderr);
}

#[test]
fn a_missing_rank_is_reported_before_the_job_starts() {
    let resumed = ResumedJob::from_deepspeed("z2");
    let copy = resumed.job_dir.path("copy");
    let tag = copy.join("global_step3");
    fs::create_dir_all(&tag).unwrap();
    fs::write(copy.join("latest"), "global_step3").unwrap();
    for entry in fs::read_dir(locate_deepspeed_recording("z2").join("global_step3")).unwrap().flatten() {
        fs::copy(entry.path(), tag.join(entry.file_name())).unwrap();
    }
    fs::remove_file(tag.join("zero_pp_rank_1_mp_rank_00_optim_states.pt")).unwrap();
    let mut messages = String::new();
    for from in ["resume.from=copy", "resume.from=nowhere"] {
        let rejected = resumed.expect_rejection(&[from]);
        let failure = rejected.expect_failure();
        messages += &format!("{from}: {}: {}\n", failure["code"], failure["message"].as_str().unwrap());
        let (exit_code, error) = resumed.job_dir.expect_rejection(&["plan", "job.yaml", "--set", from]);
        assert_eq!((exit_code, &error["code"]), (4, &failure["code"]));
    }
    resumed.job_dir.assert_snapshot("missing_files", &messages);
}

/// Returns the last component of a path.
fn extract_file_name(path: &std::path::Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}
