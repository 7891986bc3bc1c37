//! Tests that another user of the machine gets nothing from `launch serve`: no answer without the
//! token, and no way to read the token or the records of the run.
use super::{
    can_become_other_user, command_of_other_user, list_process_tree, open_to_all_users, run_as_other_user,
    wait_for,
};
use crate::support::{FinishedRun, JobDirectory, list_files_below, output_to_text, served_page::ServedPage};
use serde_json::Value;
use std::{fs, path::Path};

/// A job whose program prints a text, and runs until the test creates the file `done`.
const WAITING_JOB: &str = "\
name: served
run: {command: [sh, -c, 'echo private-text; : > started; while [ ! -e done ]; do sleep 0.05; done']}
cluster: {workers_per_host: 1}
";

/// A Python program that requests each path among its arguments without the token and with wrong
/// tokens, in several ways. The first argument is the address of the server. The program prints a
/// line of JSON for each answer: how it asked, the status, and the body.
const REQUEST_ALL: &str = "\
import http.client, json, sys
address, paths, wrong = sys.argv[1], sys.argv[2:], '0' * 64
def ask(method, path, headers):
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors='replace')
for path in paths:
    query = '&' if '?' in path else '?'
    for method, target, headers in [
        ('GET', path, {}), ('HEAD', path, {}), ('POST', path, {}), ('OPTIONS', path, {}),
        ('GET', path + query + 'token=', {}), ('GET', path + query + 'token=' + wrong, {}),
        ('GET', path, {'Authorization': 'Bearer ' + wrong}), ('GET', path, {'Authorization': 'Bearer '}),
        ('GET', path, {'Cookie': 'token=' + wrong}), ('GET', path, {'Host': 'example.com'}),
        ('GET', path, {'Origin': 'http://example.com'}), ('GET', 'http://' + address + path, {}),
    ]:
        status, body = ask(method, target, headers)
        print(json.dumps([[method, target, headers], status, body]))
";

/// The paths that the server has, for the run `run`, and paths that it does not have.
fn list_paths(run: &str) -> (Vec<String>, Vec<String>) {
    let fixed = ["/", "/index.html", "/app.js", "/style.css", "/favicon.svg", "/metrics", "/api/runs"];
    let of_run = ["/api/logs?", "/api/log?rank=0&", "/api/search?text=private&"];
    let mut known: Vec<String> = fixed.map(str::to_owned).to_vec();
    known.extend(of_run.map(|path| format!("{path}run={run}")));
    let unknown = ["/nothing", "/api", "//metrics", "/../../etc/passwd", "/runs/", "/report.html"];
    (known, unknown.map(str::to_owned).to_vec())
}

/// Checks that the server answers requests of the other user with 401 or 403, and that no answer
/// contains data of the run.
fn check_requests(served: &ServedPage, run: &str) {
    let (host, token) = served.host_and_token();
    let (known, unknown) = list_paths(run);
    for path in &known {
        assert!(served.get(path, true).starts_with("HTTP/1.1 200 "), "{path} exists");
    }
    let stream = format!("/api/stream?run={run}");
    let paths: Vec<&str> = known.iter().chain(&unknown).chain([&stream]).map(String::as_str).collect();
    let args = [&["-c", REQUEST_ALL, host], paths.as_slice()].concat();
    let output = command_of_other_user("python3", &args).output().unwrap();
    assert!(output.status.success(), "{}", output_to_text(&output));
    let answers = String::from_utf8(output.stdout).unwrap();
    assert_eq!(answers.lines().count(), 12 * paths.len());
    for line in answers.lines() {
        let answer: Value = serde_json::from_str(line).unwrap();
        assert!(matches!(answer[1].as_u64(), Some(401 | 403)), "{line}");
        let body = answer[2].as_str().unwrap();
        assert!([run, token, "private-text", "served"].iter().all(|text| !body.contains(text)), "{line}");
    }
}

/// Checks that the other user cannot read the token from the processes of `launch serve`, of its
/// run, and of anything else on the machine.
fn check_processes(served: &ServedPage, run: u32) {
    let token = served.host_and_token().1;
    for pid in list_process_tree(served.pid()).into_iter().chain(list_process_tree(run)) {
        for file in ["environ", "maps", "mem", "io", "fd/1"] {
            let read = run_as_other_user(&format!("head -c 1 /proc/{pid}/{file}"));
            assert!(
                read.stdout.is_empty() && !read.status.success(),
                "{pid}/{file}: {}",
                output_to_text(&read)
            );
        }
        let listed = run_as_other_user(&format!("ls /proc/{pid}/fd"));
        assert!(listed.stdout.is_empty() && !listed.status.success(), "{}", output_to_text(&listed));
    }
    let read = run_as_other_user("cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/[0-9]*/task/*/cmdline");
    let text = String::from_utf8_lossy(&read.stdout);
    assert!(text.contains("\0serve\0"), "the command line of `launch serve` is readable");
    assert!(!text.contains(token), "the token is in a command line or in an environment");
}

/// Checks that the other user cannot read any file of the run, nor the report, and that no file
/// contains the token.
fn check_files(job_dir: &JobDirectory, run_dir: &Path, token: &str) {
    let (mut private, mut readable) = (Vec::new(), Vec::new());
    for name in list_files_below(&job_dir.path("")) {
        let path = job_dir.path(&name);
        let content = fs::read(&path).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&content).contains(token), "{name} contains the token");
        let read = run_as_other_user(&format!("cat '{}'", path.display()));
        let is_private = !read.status.success() && read.stdout.is_empty();
        if path.starts_with(run_dir) || name == "report.html" {
            assert!(is_private, "{name}: {}", output_to_text(&read));
            private.push(name);
        } else if !is_private {
            readable.push(name);
        }
    }
    for name in ["run.json", "events.jsonl", "job.json", "report.html", "rank-0.log"] {
        assert!(private.iter().any(|path| path.ends_with(name)), "{name}: {private:?}");
    }
    assert!(private.contains(&"report.html".to_owned()), "{private:?}");
    let listed = run_as_other_user(&format!("ls '{}'", run_dir.display()));
    assert!(listed.stdout.is_empty() && !listed.status.success(), "{}", output_to_text(&listed));
    // The file for a node exporter is meant for other users.
    assert!(readable.contains(&"metrics.prom".to_owned()), "{readable:?}");
}

#[test]
fn another_user_gets_nothing_of_a_served_run() {
    if !can_become_other_user("isolation_other_users::another_user_gets_nothing_of_a_served_run") {
        return;
    }
    let job_dir = JobDirectory::new();
    open_to_all_users(&job_dir);
    fs::write(job_dir.path("job.yaml"), WAITING_JOB).unwrap();
    let child = job_dir.start(&[]);
    wait_for("the program runs", || job_dir.path("started").exists().then_some(()));
    let directories = || fs::read_dir(job_dir.path("runs/served")).into_iter().flatten().flatten();
    let run_dir = wait_for("the run directory", || {
        directories().map(|entry| entry.path()).find(|path| path.join("run.json").exists())
    });
    let run = run_dir.file_name().unwrap().to_str().unwrap();
    let served = ServedPage::start(&job_dir, &[run, "--textfile", "metrics.prom"]);
    for args in [&["report", run][..], &["report", run, "--output", "report.html"]] {
        let report = job_dir.run_launch(args);
        assert!(report.status.success(), "{}", output_to_text(&report));
    }
    check_requests(&served, run);
    check_processes(&served, child.id());
    check_files(&job_dir, &run_dir, served.host_and_token().1);
    fs::write(job_dir.path("done"), "").unwrap();
    FinishedRun::from_output(&child.wait_with_output().unwrap()).expect_success();
}
