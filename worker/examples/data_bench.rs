//! Benchmark of tokenizing data files into token caches, which prints the time, a digest of the
//! tokens, and the peak memory.
//!
//!     cargo run --release -p worker --example data_bench -- tokenizer.json rounds [chat:]file…
#![allow(clippy::unwrap_used)] // a benchmark
use jobspec::{DataSource, DataSpec, LossTargets, RecordFormat, TokenizerSpec};
use std::{fs, path::Path, time::Instant};
use worker::data::{Dataset, Split};

/// Returns the data settings (`train.data`) of a job whose only data source is the file `file`.
fn create_data_spec(tokenizer: &str, file: &str) -> DataSpec {
    let (file, is_chat) = file.strip_prefix("chat:").map_or((file, false), |file| (file, true));
    let source = DataSource {
        name: String::new(),
        weight: 1.0,
        files: vec![file.to_owned()],
        format: if is_chat { RecordFormat::Chat } else { RecordFormat::Text },
        field: if is_chat { "messages" } else { "text" }.into(),
        loss_on: if is_chat { LossTargets::Assistant } else { LossTargets::All },
    };
    DataSpec {
        sources: vec![source],
        chat_template: None,
        tokenizer: TokenizerSpec::File(tokenizer.into()),
        seq_len: 256,
        pack: true,
        shuffle: true,
        held_out: 0.0,
        cache: ".launch-cache".into(),
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, tokenizer, rounds, files @ ..] = args.as_slice() else {
        panic!("usage: data_bench tokenizer.json rounds [chat:]file…")
    };
    for file in files {
        let spec = create_data_spec(tokenizer, file);
        let mut seconds = Vec::new();
        let mut digest = String::new();
        for _ in 0..rounds.parse().unwrap() {
            _ = fs::remove_dir_all(".launch-cache");
            let began = Instant::now();
            let data = Dataset::open(&spec, None, Split::Train, Path::new(".")).unwrap();
            seconds.push(began.elapsed().as_secs_f64());
            digest = format!("{} tokens, {}", data.token_count(), &data.digest()[..16]);
        }
        seconds.sort_by(f64::total_cmp);
        println!(
            "{file}: median {:.3} s (min {:.3}), {digest}, peak {} MiB",
            seconds[seconds.len() / 2],
            seconds[0],
            worker::runtime::training_loop::read_peak_resident_bytes() >> 20
        );
    }
}
