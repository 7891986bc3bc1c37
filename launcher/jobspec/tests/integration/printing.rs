//! Tests that loading a printed job gives an equal job, and that every key is printed.
use diagnostic::render_all;
use jobspec::{JobSource, JobSpec, KEYS, KeyDefault, SourceMap, load_job};
use proptest::prelude::*;

/// Loads the job in `text` with the `--set` arguments `set`. Returns the job and the locations of
/// its keys. Panics if the job is rejected.
fn load_text(text: &str, set: &[String]) -> (JobSpec, SourceMap) {
    match load_job(JobSource::Text { name: "a.yaml".to_owned(), text: text.to_owned() }, set) {
        Ok((job, map, _)) => (job, map),
        Err(problems) => panic!("{text}\n{}", render_all(&problems, false)),
    }
}

/// The jobs that the tests print and load again. Together they contain every key of job.yaml.
const JOBS: &[&str] = &[
    "cluster: {hosts: [a, 'me@n[1-3]:22'], include: ['a:0@n1:22'], ssh: {user: 'x', port: 2222, key: ~/.ssh/k, config: none, client: openssh, known_hosts: accept_new, jump: 'j@b:1', connect_timeout: 5s, fanout: 3}}\nrun: {command: [a]}",
    "cluster: {hosts: {file: 'my hosts'}, exclude: 'b:1', ssh: {config: ./cfg}}\nrun: {command: [a]}",
    "run: {command: [a, -b, '', '1', 'x y'], env: {A: 'true', B: \"\\n\", S: {from_env: T}, F: {from_file: 'a b}.txt'}}, grace_period: 1500ms, restarts: 3, min_hosts: 2, hang_timeout: 90s, progress_pattern: 'step ', host_lease: 4s, controller_lease: 3m, on_controller_loss: continue, controller_timeout: 1h, signals: {SIGUSR2: save, SIGTERM: ignore}, stop_signal: SIGUSR2, stop_timeout: 2m}\ncluster: {use_hosts: 4}",
    "train: {data: {files: [a.txt]}}\n\
     slurm: {partition: 'a,b', account: c, qos: d, nodes: 4, time: 2h, gpus_per_node: 8, cpus_per_task: 96, mem: 64GiB, \
     extra: [\"--constraint=x y\"], signal_time: 90s, requeues: 0, bcast: true}",
    "name: b\ncluster: {workers_per_host: 3, devices: cpu, master_port: 1}\n\
     train: {data: {files: [a], tokenizer: t.json}, optimizer: {name: sgd}, schedule: {name: wsd}, eval: {files: [b], sample: {prompt: 'a \"b: c', tokens: 3, temperature: 0.5}}, clip_norm: off}\n\
     checkpoint: {every: 90s}\nresume: {from: ./x, rng: strict}",
    "train: {model: {family: mixtral, num_experts: 4, num_experts_per_tok: 1, moe_intermediate_size: 8}, data: {files: [a]}, \
     experts: {expert_parallel_size: 2, placement: {0: 1, 1: 0, 2: 0, 3: 1}, aux_loss: 0.5, z_loss: 1e-3}}",
    "train: {model: {from: m}, data: {files: [a]}, experts: {expert_parallel_size: 4, placement: {1: {0: 3}, 7: {0: 1, 1: 2}}}}",
    "train: {model: {from: './a b', dropout: 0}, data: {files: [a]}, steps: 0}",
    "train: {model: {family: gpt2, dropout: 0}, data: {files: [a]}}",
    "train: {model: {family: gpt2, dropout: 0.125}, data: {files: [a]}}",
    "train: {model: {from: m, dropout: 0.5}, data: {files: [a]}}",
    "train: {data: {mixture: {web: {files: ['w/*.parquet'], weight: 0.7}, talk: {files: [t.jsonl], format: chat, field: chat, loss_on: all}}, \
     tokenizer: t.json, chat_template: 'a b.jinja'}}",
    "train: {data: {files: [t.jsonl], format: chat}}",
    "train: {model: {from: m}, data: {files: [a], tokenizer: bytes}}",
    "train: {model: {from: m}, data: {files: [a]}, optimizer: {name: lion}}",
    "train: {data: {files: [a]}, optimizer: {name: muon, momentum: 0.9, eps: 1e-6, groups: [{match: [a], momentum: 0}]}}",
    "train: {data: {files: [a]}, optimizer: {name: adafactor, beta1: 0, beta2_decay: -1, clip_threshold: 0.5, groups: [{match: [a], eps: 1e-20}]}}",
    "train: {data: {files: [a]}, optimizer: {name: sgd, momentum: 0.5, groups: [{match: [a], momentum: 0.25}]}}",
    "train: {data: {files: [a]}, train_only: [x, '*y']}",
    "train: {data: {files: [a]}, freeze: ['model.embed*', b], \
     optimizer: {groups: [{match: ['*norm*', x], lr: 1e-5, betas: [0.5, 0.25]}, {match: [y], lr_scale: 0, weight_decay: 1, eps: 1e-3}]}}",
    "train: {model: {from: m}, data: {files: [a]}, lora: {rank: 4, alpha: 2.5, dropout: 0.1, rslora: true, targets: [q_proj, 'a b']}}",
    "train: {model: {from: m}, data: {files: [a]}, lora: {}}",
    "train: {data: {files: [a]}, zero: {offload: {optimizer: './a b'}}}",
    "train: {data: {files: [a]}, zero: {offload: {optimizer: ./cpu}}}",
    "cluster: {devices: cuda}\ntrain: {data: {files: [a]}, zero: {offload: {optimizer: cpu}}}",
    "train: {data: {files: [a]}, precision: fp16, loss_scale: {initial_scale_power: 8, loss_scale_window: 10, min_loss_scale: 0.5}}",
    "train: {model: {from: m}, data: {files: [a]}, lora: {from: ./x, dropout: 0.5}}",
    "train: {data: {files: [a]}, precision: bf16}",
    "train: {data: {files: [a]}, precision: fp8}",
    "train: {data: {files: [a]}}\ncheckpoint: {memory: {copies: 2, every: 5}}",
    "train: {data: {files: [a]}}\ncheckpoint: {memory: {}}",
    "train: {data: {files: [a]}, deterministic: false}",
    "train: {data: {files: [a]}, attention: flash}",
    "cluster: {devices: cuda}\ntrain: {data: {files: [a]}, precision: bf16, deterministic: false, attention: cudnn}",
    "train: {data: {files: [a]}, cuda_graphs: true}",
    "train: {data: {files: [a]}, cuda_graphs: false}",
    "train: {data: {files: [a]}, precision: bf16, master_weights: false}",
    "cluster: {devices: cuda, workers_per_gpu: 2, comm_backend: host, cuda_library_paths: ['a b', /c]}\ntrain: {data: {files: [a]}}",
    "cluster: {devices: [2, 0], comm_backend: nccl}\ntrain: {data: {files: [a]}}",
    "train: {data: {files: [a]}, precision: fp16, loss_scale: {initial_scale_power: 12, loss_scale_window: 7, min_loss_scale: 0.5}}",
    "train: {data: {files: [a]}, schedule: {name: constant}, recompute: block}\ncheckpoint: {every: never}\nresume: {from: never}",
    "run: {command: [a], activate: [{venv: 'a b'}, {conda: c}, {modules: [d/1]}, {script: e}], activate_timeout: 5s, wrap: [{ranks: '0,3-5', command: [nice, '{rank}']}], container: {image: a.sif, runtime: enroot, mounts: ['/d:/e:ro']}, terminal: 1}",
    "run: {command: [a], straggler: {share: 12.5%}}\nobserve: {mlflow: {}}",
    "run: {command: [a]}\nobserve: {metrics: '127.0.0.1:9400', metrics_file: /a/b.prom, mlflow: {uri: 'https://h:5000/a', experiment: 'a b', run_name: c}}",
    "cluster: {hosts: join, join: {nodes: 3, rendezvous: 'a:1', key_file: k, insecure: false, timeout: 5m, last_call: 3s}}\nrun: {command: [a]}",
];

#[test]
fn a_printed_job_loads_to_the_same_job() {
    for text in JOBS {
        let (spec, _) = load_text(text, &[]);
        assert_eq!(load_text(&spec.to_yaml(), &[]).0, spec, "{}", spec.to_yaml());
    }
}

/// Agents and workers receive jobs as JSON, which is also stored in the run directory.
#[test]
fn a_job_with_any_keys_round_trips_through_json() {
    for text in JOBS {
        let (spec, _) = load_text(text, &[]);
        let json = serde_json::to_string(&spec).expect("prints");
        assert_eq!(serde_json::from_str::<JobSpec>(&json).expect("parses"), spec, "{json}");
    }
}

#[test]
fn every_key_is_printed() {
    let maps: Vec<SourceMap> =
        JOBS.iter().map(|text| load_text(&load_text(text, &[]).0.to_yaml(), &[]).1).collect();
    for key in KEYS.iter().filter(|k| k.default != KeyDefault::Section) {
        assert!(maps.iter().any(|m| m.is_key_given(&key.path)), "{} is never printed", key.path);
    }
}

/// Checks that the defaults of `intermediate_size` and `tie_word_embeddings` depend on the model
/// family.
#[test]
fn defaults_follow_the_family() {
    let model = |family: &str| {
        let text = format!("train: {{model: {{family: {family}, hidden_size: 64}}, data: {{files: [a]}}}}");
        let model = load_text(&text, &[]).0.train.expect("train").model;
        (model.intermediate_size, model.tie_word_embeddings)
    };
    assert_eq!(model("gpt2"), (256, true));
    assert_eq!(model("gemma2"), (176, true));
    assert_eq!(model("llama"), (176, false));
}

proptest! {
    #[test]
    fn any_text_and_number_is_printed_exactly(
        word in "\\PC{0,20}|[\\x00-\\x7f&&[^\\x00]]{0,8}",
        lr in 1e-300f64..1e300,
        decay in 0f64..1e30,
        eps in 1e-30f64..1e30,
        seed in any::<u64>(),
    ) {
        let (mut spec, _) = load_text(JOBS[2], &[]);
        spec.run.command = Some(vec!["p".to_owned(), word.clone()]);
        spec.run.env = vec![("A".to_owned(), word)];
        prop_assert_eq!(&load_text(&spec.to_yaml(), &[]).0, &spec);
        let (mut spec, _) = load_text(JOBS[3], &[]);
        let train = spec.train.as_mut().expect("train");
        (train.optimizer.lr, train.optimizer.weight_decay, train.optimizer.eps, train.seed) = (lr, decay, eps, seed);
        train.schedule.name = jobspec::ScheduleName::Linear;
        train.schedule.min_lr = lr / 3.0;
        prop_assert_eq!(&load_text(&spec.to_yaml(), &[]).0, &spec);
    }
}
