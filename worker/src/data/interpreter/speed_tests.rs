//! Compares the speed of interpreting documents in a sandbox process with the speed in the process
//! of its caller.
use super::{handler::DocumentInterpreter, limits::MAX_REQUEST_TEXT_BYTES, *};
use crate::data::split::SplitFilter;
use jobspec::LossTargets;
use nix::sys::resource::{UsageWho, getrusage};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Size of the text that is tokenized, in bytes.
const TEXT_BYTES: usize = 40 << 20;
/// Number of chats that are rendered.
const CHATS: usize = 50_000;
/// Number of times that each of the two ways (in the process, in a sandbox process) is measured.
/// The measurements alternate.
const ROUNDS: usize = 5;
/// Number of threads that interpret documents, in the process or in a sandbox process.
const THREADS: usize = 2;

/// The documents that a measurement interprets, with the tokenizer and the chat template.
struct Work {
    name: &'static str,
    documents: Vec<String>,
    /// The source of the chat template, if the documents are chats.
    template: Option<String>,
    tokenizer: Option<Arc<[TokenizerFile]>>,
}

/// Returns the text of the sources and documents of this repository, repeated to [`TEXT_BYTES`].
fn read_texts(root: &Path) -> Vec<String> {
    let (mut pending, mut files): (Vec<PathBuf>, Vec<PathBuf>) =
        (vec![root.join("docs"), root.join("worker/src")], vec![]);
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).unwrap().flatten() {
            match entry.path() {
                path if path.is_dir() => pending.push(path),
                path if path.extension().is_some_and(|e| e == "md" || e == "rs") => files.push(path),
                _ => {}
            }
        }
    }
    files.sort();
    let texts: Vec<String> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let mut bytes = 0;
    let is_needed = |text: &&String| {
        bytes += text.len();
        bytes < TEXT_BYTES
    };
    texts.iter().cycle().take_while(is_needed).cloned().collect()
}

/// Returns the CPU time of this process and its ended children.
fn read_cpu_time() -> Duration {
    let time = |who| {
        let usage = getrusage(who).unwrap();
        let (user, system) = (usage.user_time(), usage.system_time());
        Duration::from_micros((user.tv_sec() + system.tv_sec()) as u64 * 1_000_000)
            + Duration::from_micros((user.tv_usec() + system.tv_usec()) as u64)
    };
    time(UsageWho::RUSAGE_SELF) + time(UsageWho::RUSAGE_CHILDREN)
}

impl Work {
    /// Returns the documents in batches of the size that a job sends at once.
    fn batches(&self) -> Vec<Vec<Document<'_>>> {
        let mut batches: Vec<Vec<Document>> = vec![Vec::new()];
        let mut bytes = 0;
        for text in &self.documents {
            bytes += text.len();
            if bytes > MAX_REQUEST_TEXT_BYTES {
                batches.push(Vec::new());
                bytes = text.len();
            }
            let document =
                if self.template.is_some() { Document::ChatLine(text) } else { Document::Text(text) };
            batches.last_mut().unwrap().push(document);
        }
        batches
    }

    fn options(&self) -> DocumentOptions<'static> {
        let field = if self.template.is_some() { "messages" } else { "text" };
        DocumentOptions { field, loss_on: LossTargets::All, filter: SplitFilter::All, tokenize: true }
    }

    /// Interprets the documents in this process. Returns the number of tokens.
    fn run_in_process(&self) -> usize {
        let mut interpreter = DocumentInterpreter::default();
        if let Some(files) = &self.tokenizer {
            let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            interpreter.load_tokenizer(&files).unwrap();
        }
        if let Some(template) = &self.template {
            interpreter.compile_template(template, &[("eos_token", "</s>")]).unwrap();
        }
        let batches = self.batches();
        let results =
            batches.iter().map(|batch| interpreter.interpret_documents(batch, &self.options(), &mut |_| ()));
        results.map(|results| results.iter().map(count_tokens).sum::<usize>()).sum()
    }

    /// Interprets the documents in a sandbox process. Returns the number of tokens.
    fn run_in_sandbox(&self) -> usize {
        let interpreter = SandboxInterpreter::new(THREADS);
        if let Some(files) = &self.tokenizer {
            interpreter.load_tokenizer(files).unwrap().unwrap();
        }
        if let Some(source) = &self.template {
            let special_tokens = vec![("eos_token".to_owned(), "</s>".to_owned())];
            interpreter
                .compile_template(TemplateSource { source: source.clone(), special_tokens })
                .unwrap()
                .unwrap();
        }
        let mut stream = interpreter.open_stream();
        let mut tokens = 0;
        let mut receive = |stream: &mut RequestStream| {
            let results: Vec<DocumentResult> = stream.receive().unwrap();
            tokens += results.iter().map(count_tokens).sum::<usize>();
        };
        for (i, batch) in self.batches().into_iter().enumerate() {
            let limits = documents_request_limits(batch.iter().map(|d| d.as_str().len()), THREADS);
            stream
                .send(&Request::Documents { documents: batch, options: self.options() }, None, &limits)
                .unwrap();
            if i > 0 {
                receive(&mut stream);
            }
        }
        receive(&mut stream);
        drop(stream);
        interpreter.end_process();
        tokens
    }
}

fn count_tokens(result: &DocumentResult) -> usize {
    match result {
        DocumentResult::Tokens(tokens) => tokens.0.len(),
        other => panic!("{other:?}"),
    }
}

/// Prints the lowest CPU time and wall time of interpreting documents in this process and in a
/// sandbox process, as rows of a Markdown table.
#[test]
#[ignore = "measures speed"]
fn print_the_speed_of_the_sandbox_process() {
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let file = |name: &str| (name.to_owned(), read(&format!("tests/golden/data/{name}")));
    let tokenizer: Arc<[TokenizerFile]> = Arc::new([file("tokenizer.json"), file("tokenizer_config.json")]);
    let texts = read_texts(root);
    let chat = |text: &String| {
        let at = text.floor_char_boundary(400);
        let (question, answer) = text.split_at(at);
        let answer = &answer[..answer.floor_char_boundary(400)];
        serde_json::json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
            .to_string()
    };
    let chats: Vec<String> = texts.iter().map(chat).cycle().take(CHATS).collect();
    let template = Some(read("worker/tests/corpus/chatml.template"));
    let works = [
        Work {
            name: "tokenize 40 MiB",
            documents: texts,
            template: None,
            tokenizer: Some(tokenizer.clone()),
        },
        Work {
            name: "render 50,000 chats",
            documents: chats.clone(),
            template: template.clone(),
            tokenizer: None,
        },
        Work {
            name: "render and tokenize 50,000 chats",
            documents: chats,
            template,
            tokenizer: Some(tokenizer),
        },
    ];
    println!(
        "| work | CPU time in process | CPU time in sandbox | wall time in process | wall time in sandbox |"
    );
    for work in works {
        let mut best = [[f64::INFINITY; 2]; 2];
        let mut tokens = [0; 2];
        for _ in 0..ROUNDS {
            for (way, run) in [Work::run_in_process, Work::run_in_sandbox].into_iter().enumerate() {
                let (cpu, began) = (read_cpu_time(), Instant::now());
                tokens[way] = run(&work);
                let cpu = (read_cpu_time() - cpu).as_secs_f64();
                best[way] = [best[way][0].min(cpu), best[way][1].min(began.elapsed().as_secs_f64())];
            }
        }
        assert_eq!(tokens[0], tokens[1], "{}", work.name);
        let [[cpu, wall], [sandbox_cpu, sandbox_wall]] = best;
        println!("| {} | {cpu:.2} s | {sandbox_cpu:.2} s | {wall:.2} s | {sandbox_wall:.2} s |", work.name);
    }
}
