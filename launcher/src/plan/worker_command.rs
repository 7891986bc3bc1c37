//! Builds the command line of a worker that runs the user's program, including the programs that
//! wrap it, such as a profiler.
use jobspec::{RunSpec, ids::Rank};

/// Builds the command line of a worker: the user's program, preceded by the programs that wrap it,
/// such as a profiler. If `run.local_rank_argument` is set, `--local_rank=N` follows the script.
/// Returns `None` for the built-in runtime.
pub(super) fn build_worker_command(run: &RunSpec, local_rank: Rank) -> Option<Vec<String>> {
    let mut words = run.command.clone()?;
    if run.local_rank_argument {
        let at = find_script_index(&words) + 1;
        words.insert(at.min(words.len()), format!("--local_rank={local_rank}"));
    }
    Some(words)
}

/// Returns the words that precede a worker's command to run it under another program, such as a
/// profiler (`run.wrap` in job.yaml). The first item of the job is the outermost program. `values`
/// are the placeholders of a worker with their values.
pub(super) fn build_wrapper(run: &RunSpec, rank: Rank, values: &[(&str, String)]) -> Vec<String> {
    let items = run.wrap.iter().filter(|item| item.ranks.contains(rank));
    items.flat_map(|item| item.expand_words(values)).collect()
}

/// Returns the index of the word that names the user's script in a command line such as `python -u
/// train.py`. The script is the first word after Python and its options. In other commands it is
/// the program itself.
fn find_script_index(words: &[String]) -> usize {
    let program = words.first().map_or("", |w| w.rsplit('/').next().unwrap_or(w));
    if !program.starts_with("python") && !program.starts_with("pypy") {
        return 0;
    }
    let mut at = 1;
    while let Some(word) = words.get(at) {
        match word.as_str() {
            // The module or the program text is the next word.
            "-m" | "-c" => return at + 1,
            "-W" | "-X" | "--check-hash-based-pycs" => at += 2,
            option if option.starts_with('-') && option.len() > 1 => at += 1,
            _ => return at,
        }
    }
    words.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_local_rank_follows_the_script() {
        for (command, expected) in [
            ("python train.py --lr 1", "python train.py --local_rank=3 --lr 1"),
            (
                "/usr/bin/python3.11 -u -W error train.py",
                "/usr/bin/python3.11 -u -W error train.py --local_rank=3",
            ),
            ("python -m pkg.train x", "python -m pkg.train --local_rank=3 x"),
            ("./train x", "./train --local_rank=3 x"),
            ("python", "python --local_rank=3"),
            ("python -m", "python -m --local_rank=3"),
        ] {
            let mut run = crate::testing::sample_job().run;
            run.command = Some(command.split(' ').map(str::to_owned).collect());
            assert_eq!(build_worker_command(&run, 3), run.command, "not without `local_rank_argument`");
            run.local_rank_argument = true;
            assert_eq!(build_worker_command(&run, 3).expect("words").join(" "), expected);
        }
    }
}
