//! The built-in runtime goes on from what DeepSpeed saved, with the losses with which DeepSpeed itself went on.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use std::fs;
use support::continued::{Continued, golden, notices};

#[test]
fn the_losses_are_those_with_which_deepspeed_went_on() {
    for name in ["z2", "z3_tied"] {
        let continued = Continued::of(name);
        let mut bits = Vec::new();
        for (workers, stage) in [(1, 0), (2, 3), (3, 1), (4, 2)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(["checkpoint.every=never"]).collect();
            let ran = continued.run(&set).succeeded();
            let resumed = ran.kind("resume")[0];
            assert_eq!((&resumed["step"], &resumed["world"]), (&3.into(), &2.into()));
            continued.follows(&ran);
            let steps = ran.kind("step");
            // linear from 2e-3 at step 2 to 0 at step 20; the fourth step has 3 behind it
            let lr = steps[0]["lr"].as_f64().unwrap();
            assert!((lr - 2e-3 * 17.0 / 18.0).abs() < 1e-12, "{lr}");
            let told = notices(&ran);
            assert!(
                told.iter().any(|m| m.contains("sample 12 ") && m.contains("as the checkpoint says")),
                "{told:?}"
            );
            let differs = |m: &&String| {
                m.contains("goes on with") || m.contains("learning rate") || m.contains("scheduler")
            };
            assert_eq!(told.iter().find(differs), None, "nothing differs");
            bits.push(ran.losses());
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "{name}: the number of workers changes the losses");
    }
}

/// What DeepSpeed's own `ds_to_universal` made of `z2`: read as it is, and converted to a checkpoint of ours.
#[test]
fn the_losses_are_those_of_deepspeed_by_way_of_its_universal_format() {
    let mut continued = Continued::of("z2");
    let universal = golden("z2_universal");
    let native = continued.place.path("native");
    let arguments =
        ["ckpt", "convert", universal.to_str().unwrap(), native.to_str().unwrap(), "--to", "native"];
    let made = continued.place.launch(&arguments);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for from in [universal, native] {
        continued.from = from;
        // whose data stood nowhere: the sample is given by the documents that follow
        for workers in [1, 3] {
            let workers = format!("cluster.workers_per_host={workers}");
            let ran = continued.run(&[&workers, "checkpoint.every=never"]).succeeded();
            continued.follows(&ran);
        }
    }
}

/// The same folder with a model file of another writer, which doesn't say which parameter is in which of the two groups.
#[test]
fn a_folder_that_does_not_say_its_groups_is_gone_on_from() {
    let mut continued = Continued::of("z2");
    continued.from = golden("z2_universal");
    let open = continued.copy_without(&["next.json"]);
    let made_by_hand =
        concat!(env!("CARGO_MANIFEST_DIR"), "/worker/ckpt/tests/golden/tiny/hybrid/global_step3_universal");
    let model = "mp_rank_00_model_states.pt";
    fs::copy(format!("{made_by_hand}/{model}"), open.join("global_step3_universal").join(model)).unwrap();
    let convert = |out: &str, to: &str, more: &[&str], code: i32| {
        let (from, out) = (open.display().to_string(), continued.place.path(out));
        let all = [&["ckpt", "convert", &from, out.to_str().unwrap(), "--to", to], more].concat();
        let ran = continued.place.launch(&all);
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!((ran.status.code(), out.exists()), (Some(code), code == 0), "{said}");
        (out, said)
    };
    let (native, said) = convert("native", "native", &[], 0);
    assert_eq!(said.matches("it has 2 groups of parameters and doesn't say").count(), 1, "{said}");
    let (_, said) = convert("out", "deepspeed", &[], 4);
    assert!(said.contains("--group 'PATTERN=N'") && said.contains("--to native"), "{said}");
    let norms = "--group=*norm*=1";
    for (more, reason) in [
        (&["--group=norm"][..], "give a pattern of names and the number of a group"),
        (&["--group=*norm*=one"], "give a pattern of names and the number of a group"),
        (&["--group=[=1"], "bad pattern"),
        (&["--group=*norm*=2"], "the checkpoint has the groups 0 to 1"),
        (&[norms, "--group=*.bias=1"], "the pattern `*.bias` matches no parameter whose group is open"),
        (&[norms, "--group=model.norm.*=1"], "both `*norm*` and `model.norm.*` match model.norm.weight"),
    ] {
        let (_, said) = convert("out", "deepspeed", more, 2);
        assert!(said.contains(reason), "{said} lacks {reason}");
    }
    let (_, said) = convert("out", "safetensors", &[norms], 2);
    assert!(said.contains("--group has no meaning for --to safetensors"), "{said}");
    let (deepspeed, _) = convert("deepspeed", "deepspeed", &[norms, "--world=3"], 0);
    let known = continued.place.launch(&[
        "ckpt",
        "convert",
        deepspeed.to_str().unwrap(),
        "again",
        "--to=universal",
        norms,
    ]);
    assert_eq!(known.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&known.stderr).contains("leaves no parameter's group open"));
    for from in [open.clone(), native, deepspeed] {
        continued.from = from;
        for workers in [1, 3] {
            let workers = format!("cluster.workers_per_host={workers}");
            let ran = continued.run(&[&workers, "checkpoint.every=never"]).succeeded();
            continued.follows(&ran);
            let told = notices(&ran);
            assert!(!told.iter().any(|m| m.contains("parameter group")), "nothing differs: {told:?}");
        }
    }
}

#[test]
fn what_differs_is_told_and_what_does_not_fit_is_refused() {
    let continued = Continued::of("z2");
    let told = notices(&continued.run(&[
        "train.optimizer.weight_decay=0.2",
        "train.optimizer.betas=[0.8,0.95]",
        "train.schedule.warmup_steps=3",
        "train.steps=4",
    ]));
    for part in [
        "`decay` goes on with weight_decay 0.2 (checkpoint: 0.1), betas (0.8, 0.95) (checkpoint: [0.9, 0.95])",
        "`no_decay` goes on with betas",
        "the next step's learning rate is 0.002 by train.schedule",
    ] {
        assert!(told.iter().any(|m| m.contains(part)), "{told:?} lacks {part}");
    }
    assert!(!told.iter().any(|m| m.contains("`no_decay` goes on with weight_decay")), "{told:?}");

    let wide = continued.refused(&["train.model.intermediate_size=48"]);
    assert!(
        wide.contains("of other shapes are model.layers.0.mlp.gate_proj.weight [40, 24] (the job: [48, 24])"),
        "{wide}"
    );
    assert!(wide.contains("and 2 more"), "{wide}");
    let deep = continued.refused(&["train.model.num_hidden_layers=3"]);
    assert!(deep.contains("it lacks model.layers.2.") && deep.contains("and 5 more"), "{deep}");
    let shallow = continued.refused(&["train.model.num_hidden_layers=1"]);
    assert!(shallow.contains("the job's model hasn't model.layers.1."), "{shallow}");
    let tied = continued.refused(&["train.model.tie_word_embeddings=true"]);
    assert!(tied.contains("lm_head.weight and model.embed_tokens.weight hold different values"), "{tied}");
    let sgd = continued.refused(&["train.optimizer={name: sgd, lr: 0.1}"]);
    assert!(sgd.contains("lacks the optimizer's momentum of model.embed_tokens.weight"), "{sgd}");
}

/// A run that began from DeepSpeed's folder saves checkpoints of its own, from which it goes on with the same bits.
#[test]
fn its_own_checkpoints_follow() {
    let continued = Continued::of("z3_tied");
    let whole = continued.run(&["train.steps=10"]).succeeded().losses();
    continued.run(&["train.steps=10", "train.zero.stage=1", "checkpoint.every=3"]).succeeded();
    let root = continued.place.checkpoints();
    fs::remove_dir_all(root.join("step-00000010")).unwrap();
    let rest = continued.place.run(&["train.steps=10", "cluster.workers_per_host=3"]).succeeded();
    assert_eq!(rest.kind("resume")[0]["step"], 9);
    assert_eq!(rest.losses(), whole[6..]);
    // at its last step there is nothing to train, but something to save
    let ended = continued.run(&["train.steps=3", "train.schedule.warmup_steps=2"]).succeeded();
    assert_eq!(ended.kind("checkpoint").len(), 1, "{}", ended.stderr);
}

#[test]
fn a_lost_rank_is_named_before_anything_runs() {
    let continued = Continued::of("z2");
    let copy = continued.place.path("copy");
    let tag = copy.join("global_step3");
    fs::create_dir_all(&tag).unwrap();
    fs::write(copy.join("latest"), "global_step3").unwrap();
    for entry in fs::read_dir(golden("z2").join("global_step3")).unwrap().flatten() {
        fs::copy(entry.path(), tag.join(entry.file_name())).unwrap();
    }
    fs::remove_file(tag.join("zero_pp_rank_1_mp_rank_00_optim_states.pt")).unwrap();
    let why = continued.refused(&["resume.from=copy"]);
    assert!(why.contains("the optimizer file of rank 1 of 2"), "{why}");
    let nothing = continued.refused(&["resume.from=nowhere"]);
    assert!(nothing.contains("resume.from") && nothing.contains("nowhere"), "{nothing}");
}
