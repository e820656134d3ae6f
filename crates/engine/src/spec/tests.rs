use super::*;

fn read(text: &str) -> Result<SandboxSpec, Problem> {
    SandboxSpec::from_text(text, &Environments::default())
}

fn refusal(text: &str) -> String {
    let problem = read(text).expect_err(text);
    format!("{} {}", problem.message, problem.hint)
}

#[test]
fn three_forms_say_the_same() {
    let json = r#"{"mode": "code", "runtime": "node", "session": "db",
        "limits": {"cpu_millicores": 1000, "memory_mb": 2048, "timeout_seconds": 900, "workspace_mb": 500},
        "network": {"enabled": false}}"#;
    let yaml = "mode: code\nruntime: node # of course\nsession: db\nlimits:\n  cpu_millicores: 1000\n  memory_mb: 2048\n  \
                timeout_seconds: 900\n  workspace_mb: 500\nnetwork: {enabled: false}\n";
    let indented: String = yaml.lines().map(|line| format!("  {line}\r\n")).collect();
    let agent = format!(
        "---\r\nname: fixer\r\ntools: [a, b]\r\nsandbox:\r\n{indented}max_steps: 3\r\n---\r\n# Fixer\n\nsandbox: none\n---\n"
    );
    let spec = read(json).unwrap();
    assert_eq!(read(yaml).unwrap(), spec);
    assert_eq!(read(&agent).unwrap(), spec);
    assert_eq!(read(&format!("\u{feff}{agent}")).unwrap(), spec);
    assert_eq!(read(&format!("{{\"sandbox\": {json}}}")).unwrap(), spec);
    let base = Wish { max_lifetime_s: 7, ..Wish::default() };
    let wish = spec.wish(&base);
    assert_eq!((spec.mode, &spec.session), (Mode::Code, &Session::Named("db".parse().unwrap())));
    assert_eq!(wish.environment.as_deref(), Some("node"));
    assert_eq!((wish.limits.cpu_millis, wish.limits.memory), (1000, ByteSize::mb(2048)));
    assert_eq!((wish.limits.disk, wish.limits.pids), (ByteSize::mb(500), Limits::default().pids));
    assert_eq!((wish.idle_timeout_s, wish.max_lifetime_s, wish.first), (900, 7, Some(Language::Node)));
}

#[test]
fn the_short_form_and_what_is_left_out() {
    let spec = read("---\nsandbox: python\n---\n").unwrap();
    assert_eq!((spec.mode, spec.environment.as_deref()), (Mode::Compute, Some("python")));
    assert_eq!(read("\"bash\"").unwrap().language, Some(Language::Bash));
    assert_eq!(read("{}").unwrap(), SandboxSpec::default());
    assert_eq!(read("session: isolated").unwrap().mode, Mode::Code);
    assert_eq!(read("mode: code").unwrap().session, Session::Default);
    assert_eq!(read("image: node").unwrap().environment.as_deref(), Some("node"));
}

#[test]
fn unknown_fields_are_named_with_the_one_that_was_meant() {
    for (text, near) in [
        ("runtim: python", "`runtime`"),
        ("limits: {memory: 5}", "`limits.memory_mb`"),
        ("timeout_seconds: 300", "`limits.timeout_seconds`"),
        ("network: {enable: true}", "`network.enabled`"),
        ("mode: compte", "`compute`"),
        ("runtime: pyhton", "`python`"),
    ] {
        assert!(refusal(text).contains(&format!("did you mean {near}?")), "{text}: {}", refusal(text));
    }
    assert!(refusal("zzz: 1").contains("`zzz`"));
    assert!(refusal("---\nsandbx: python\n---\n").contains("is `sandbx` meant?"));
    assert!(refusal("---\nname: x\n---\n").contains("nothing of a `sandbox`"));
}

#[test]
fn contradictions_are_named() {
    assert!(refusal("mode: compute\nsession: db").contains("contradict"));
    assert!(refusal("runtime: node\nimage: python").contains("contradict"));
    assert!(refusal("network: {enabled: true}").contains("network.enabled"));
    let problem = read("image: \"python:3.11-slim\"").unwrap_err();
    assert_eq!(problem.code, Code::EnvironmentUnknown);
    assert!(problem.hint.contains("bash, node, python"));
    assert_eq!(read("sandbox: perl").unwrap_err().code, Code::EnvironmentUnknown);
}

#[test]
fn an_artifact_has_the_languages_that_its_manifest_names() {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("rootfs")).unwrap();
    let manifest =
        "version = 1\ndefault = \"python\"\n[interpreters.python]\nprogram = \"/usr/bin/python3\"\n";
    std::fs::write(place.path().join("manifest.toml"), manifest).unwrap();
    let mut environments = Environments::default();
    environments.add("own".into(), Source::Artifact(place.path().to_path_buf()));
    let read = |text: &str| SandboxSpec::from_text(text, &environments);
    assert_eq!(read("runtime: python\nimage: own").unwrap().environment.as_deref(), Some("own"));
    let problem = read("runtime: node\nimage: own").unwrap_err();
    assert_eq!(
        problem.message,
        "`runtime: node` and `image: own` contradict each other: that environment has python"
    );
}

#[test]
fn values_that_cannot_be_meant_are_refused() {
    for text in [
        "limits: {memory_mb: 0}",
        "limits: {memory_mb: -5}",
        "limits: {memory_mb: 1.5}",
        "limits: {memory_mb: \"512\"}",
        "limits: {memory_mb: 99999999999999999999}",
        "limits: {memory_mb: 18446744073709551615}",
        "limits: {cpu_millicores: 4294967297}",
        "limits: {timeout_seconds: null}",
        "limits: []",
        "network: true",
        "network: {enabled: 1}",
        "network: {enabled: no way}",
        "mode: 1",
        "session: [a]",
        "session: \"a:b\"",
        "session: ../x",
        "- python",
        "42",
        "",
        "{\"mode\": \"code\"",
        "mode: code\nmode: compute",
        "a: [",
        "---\nsandbox: python\n",
    ] {
        if text != "---\nsandbox: python\n" {
            assert_eq!(read(text).expect_err(text).code, Code::InvalidArgument, "{text}");
        }
    }
    // Without a second rule it is a plain YAML document.
    assert!(read("---\nsandbox: python\n").is_ok());
}

#[test]
fn bombs_are_refused_before_they_go_off() {
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for i in 1..10 {
        let before = vec![format!("*a{}", i - 1); 10].join(", ");
        laughs.push_str(&format!("a{i}: &a{i} [{before}]\n"));
    }
    assert!(read(&format!("---\n{laughs}sandbox: python\n---\n")).is_err());
    assert!(read(&"[".repeat(10_000)).is_err());
    assert!(read(&format!("{{\"mode\":{}", "[".repeat(10_000))).is_err());
    assert_eq!(read(&format!("mode: {}", "x".repeat(MAX_SPEC))).unwrap_err().code, Code::TooLarge);
    assert_eq!(read(&"x".repeat(MAX_FILE + 1)).unwrap_err().code, Code::TooLarge);
}
