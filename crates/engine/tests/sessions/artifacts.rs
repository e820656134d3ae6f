//! Environments that are a root filesystem of their own, made here from the host's shell.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use carrel_engine::{Environments, Source, Wish};
use carrel_proto::{
    guest::Language::{Bash, Node, Python},
    problem::Code,
};

use crate::world::{World, a_run};

/// The libraries a program maps, as the loader says.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let listed = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect()
}

fn copy(rootfs: &Path, file: &Path) {
    let target = rootfs.join(file.strip_prefix("/").unwrap());
    fs::create_dir_all(target.parent().unwrap()).unwrap();
    fs::copy(file, target).unwrap();
}

/// An artifact with bash, cat and what they need. Its manifest also promises a python that is not there.
fn make(directory: &Path) {
    let rootfs = directory.join("rootfs");
    for program in ["/usr/bin/bash", "/usr/bin/cat"] {
        copy(&rootfs, Path::new(program));
        libraries(Path::new(program)).iter().for_each(|library| copy(&rootfs, library));
    }
    fs::create_dir_all(rootfs.join("opt")).unwrap();
    fs::write(rootfs.join("opt/word"), "of the artifact\n").unwrap();
    std::os::unix::fs::symlink("usr/bin", rootfs.join("bin")).unwrap();
    let manifest = "version = 1\ndefault = \"bash\"\n[interpreters.bash]\nprogram = \"/usr/bin/bash\"\n\
        [interpreters.python]\nprogram = \"/usr/bin/python-of-dreams\"\n[variables]\nFLAVOUR = \"small\"\n";
    fs::write(directory.join("manifest.toml"), manifest).unwrap();
}

#[tokio::test]
async fn an_artifact_is_a_whole_environment_and_a_missing_interpreter_is_named() {
    let artifact = tempfile::tempdir().unwrap();
    make(artifact.path());
    let mut environments = Environments::default();
    environments.add("small".into(), Source::Artifact(artifact.path().into()));
    let world = World::with(environments);
    let sandbox = world.sandbox_with(Wish { environment: Some("small".into()), ..Wish::default() }).await;
    let ran = sandbox.bash("x=1; echo $FLAVOUR $PWD; cat /opt/word; echo hi > f; cat f").await.ok();
    assert_eq!(ran.out(), "small /workspace\nof the artifact\nhi\n");
    assert_eq!(
        sandbox.bash("echo $x; echo /usr/bin/*; echo no > /opt/word").await.kept(1).out(),
        "1\n/usr/bin/bash /usr/bin/cat\n"
    );
    assert_eq!(sandbox.exec(&["bash", "-c", "echo exec"]).await.ok().out(), "exec\n");

    let problem = sandbox.refused(a_run(Node, "1")).await;
    assert_eq!(problem.code, Code::InterpreterMissing);
    assert!(problem.message.contains("node") && problem.message.contains("looked for"), "{problem:?}");
    assert!(problem.message.contains("manifest"), "{problem:?}");
    assert!(!problem.hint.is_empty());
    let ran = sandbox.begin(a_run(Python, "1")).await.end().await;
    let problem = ran.outcome.problem.unwrap();
    assert!([Code::InterpreterMissing, Code::InterpreterFailed].contains(&problem.code));
    assert!(problem.message.contains("/usr/bin/python-of-dreams"), "{problem:?}");
    assert_eq!(sandbox.run(Bash, "echo $x").await.ok().out(), "1\n");
}

#[tokio::test]
async fn an_environment_that_is_not_one_is_refused_with_the_reason() {
    let artifact = tempfile::tempdir().unwrap();
    let mut environments = Environments::default();
    environments.add("broken".into(), Source::Artifact(artifact.path().into()));
    let world = World::with(environments);
    let sandbox = world.sandbox().await;
    let attempt = |name: &'static str| async {
        let key = "user:test:attempt".parse().unwrap();
        let wish = Wish {
            environment: Some(name.into()),
            max_lifetime_s: 60,
            idle_timeout_s: 60,
            ..Wish::default()
        };
        sandbox.engine.sandbox(&key, &wish).await.unwrap_err()
    };
    let problem = attempt("nonesuch").await;
    assert_eq!(problem.code, Code::EnvironmentUnknown);
    assert!(problem.hint.contains("python") && problem.hint.contains("broken"), "{problem:?}");
    assert_eq!(attempt("broken").await.code, Code::Config, "no manifest");
    fs::create_dir(artifact.path().join("rootfs")).unwrap();
    for (manifest, word) in [
        ("version = 2\ndefault = \"bash\"\n[interpreters.bash]\nprogram = \"/b\"", "version 2"),
        ("version = 1\ndefault = \"node\"\n[interpreters.bash]\nprogram = \"/b\"", "node"),
        ("version = 1\ndefault = \"bash\"\n[interpreters.bash]\nprogram = \"b\"", "absolute"),
        ("version = 1\ndefault = \"bash\"\ncolour = 1\n[interpreters.bash]\nprogram = \"/b\"", "colour"),
    ] {
        fs::write(artifact.path().join("manifest.toml"), manifest).unwrap();
        let problem = attempt("broken").await;
        assert!(problem.code == Code::Config && problem.message.contains(word), "{problem:?}");
    }
    fs::remove_dir(artifact.path().join("rootfs")).unwrap();
    fs::write(
        artifact.path().join("manifest.toml"),
        "version = 1\ndefault = \"bash\"\n[interpreters.bash]\nprogram = \"/b\"",
    )
    .unwrap();
    assert!(attempt("broken").await.message.contains("rootfs"));
    assert_eq!(sandbox.engine.list().unwrap().len(), 1, "nothing is left of them");
}
