//! `--receipt`: what a call used and did, for people.

use carrel_proto::{
    limits::ByteSize,
    outcome::{FileChanges, Receipt},
};

use crate::{output::Output, stream::End};

/// On stderr, whatever happened: stdout is the call's own.
pub(crate) fn print(end: &End, output: &Output) {
    if let End::Finished(outcome) = end {
        lines(&outcome.receipt).into_iter().for_each(|line| output.say_line(line));
    }
}

fn lines(receipt: &Receipt) -> Vec<String> {
    let cause = receipt.cause.map_or("ended", |cause| cause.as_str());
    let mut lines = vec![format!("receipt: {cause} {}, {}", receipt.exit_code, summary(receipt))];
    lines.extend(files(&receipt.files));
    if receipt.processes > 0 {
        let named = receipt.running.iter().map(|it| format!("{} `{}`", it.pid, it.command)).collect();
        lines.push(list("running:", named, receipt.processes.into()));
    }
    if !receipt.ports.is_empty() {
        let ports: Vec<String> =
            receipt.ports.iter().map(|it| format!("{} on {}", it.port, it.address)).collect();
        lines.push(format!("ports: {}", ports.join(", ")));
    }
    let hosts = &receipt.hosts;
    for (word, hosts) in [("reached:", &hosts.reached), ("refused:", &hosts.refused)] {
        if !hosts.is_empty() {
            lines.push(format!("{word} {}", hosts.join(", ")));
        }
    }
    lines
}

fn files(files: &FileChanges) -> Vec<String> {
    let mut lines = Vec::new();
    for (word, names, count) in [
        ("added:", &files.added, files.added_count),
        ("changed:", &files.changed, files.changed_count),
        ("removed:", &files.removed, files.removed_count),
    ] {
        if count > 0 {
            lines.push(list(word, names.clone(), count));
        }
    }
    if files.shared && files.total() > 0 {
        lines.push("files: other calls ran meanwhile; some of it may be theirs".to_owned());
    }
    if let Some(reason) = &files.reason {
        lines.push(format!("files: not all is known: {reason}"));
    }
    lines
}

fn list(word: &str, mut names: Vec<String>, count: u64) -> String {
    let more = count.saturating_sub(names.len() as u64);
    if more > 0 {
        names.push(format!("+{more} more"));
    }
    format!("{word} {}", names.join(", "))
}

/// The figures, in a line.
pub(crate) fn summary(receipt: &Receipt) -> String {
    format!(
        "{:.1} ms, {:.1} ms of CPU, at most {} of memory, {} processes left",
        milliseconds(receipt.duration_us),
        milliseconds(receipt.cpu_us),
        ByteSize(receipt.peak_memory),
        receipt.processes,
    )
}

#[expect(clippy::cast_precision_loss, reason = "for people, to a tenth")]
fn milliseconds(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use carrel_proto::outcome::{Cause, ProcessInfo};

    use super::*;

    #[test]
    fn a_quiet_call_is_told_in_one_line() {
        let receipt = Receipt { cause: Some(Cause::Exit), ..Receipt::default() };
        let told = lines(&receipt);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with("receipt: exit 0, 0.0 ms"), "{told:?}");
    }

    #[test]
    fn what_is_not_listed_is_counted() {
        let files = FileChanges {
            added: vec!["a".into()],
            added_count: 3,
            removed: vec!["b".into()],
            removed_count: 1,
            shared: true,
            ..FileChanges::unknown("why")
        };
        let running = vec![ProcessInfo { pid: 7, command: "sleep 9".into() }];
        let told = lines(&Receipt { files, processes: 2, running, ..Receipt::default() })[1..].join("\n");
        let expected = "added: a, +2 more\nremoved: b\nfiles: other calls ran meanwhile; some of it may be theirs\n\
                        files: not all is known: why\nrunning: 7 `sleep 9`, +1 more";
        assert_eq!(told, expected);
    }
}
