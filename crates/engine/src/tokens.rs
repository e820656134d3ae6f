//! Tokens: who may use the daemon, for what, and how much. Only digests are kept; the secret is shown once.
//!
//! A token's text is `carrel_tok_…_SECRET`. It is looked up by its id and compared by digest in constant time; one that is
//! unknown, wrong, expired or revoked is refused in the same words.

use std::{fmt, str::FromStr};

use carrel_proto::problem::{Code, Problem};
use rusqlite::{OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::{
    Engine,
    nearest::nearest,
    quota::Quota,
    registry::{Registry, failed, now_ms, signed},
    tenant::Tenant,
};

/// Longest name of a token: a word for people.
const MAX_NAME: usize = 100;
/// Longest text that is looked at.
const MAX_TEXT: usize = 200;
/// When a token was used is known to a minute: not every call writes.
const TOUCH_MS: u64 = 60_000;
/// 256 random bits.
const SECRET_BYTES: usize = 32;
const PREFIX: &str = "carrel_";

/// `tok_…`: the public half of a token, and the name of its tenant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TokenId(String);

impl TokenId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TokenId {
    type Error = Problem;
    fn try_from(text: String) -> Result<Self, Problem> {
        let tail = text.strip_prefix("tok_").unwrap_or_default();
        let good = tail.len() == 16 && tail.bytes().all(|byte| ALPHABET.contains(&byte));
        if good {
            Ok(Self(text))
        } else {
            Err(Problem::new(Code::InvalidArgument, "this is not the id of a token")
                .hint("`carrel token list` shows them: tok_…"))
        }
    }
}

impl FromStr for TokenId {
    type Err = Problem;
    fn from_str(text: &str) -> Result<Self, Problem> {
        Self::try_from(text.to_owned())
    }
}

impl From<TokenId> for String {
    fn from(id: TokenId) -> String {
        id.0
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a token is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Looking: sandboxes, files, output, events.
    Read,
    /// Making, using, changing and closing sandboxes. Whoever may do that may look.
    Run,
    /// The daemon's figures.
    Metrics,
    /// The daemon's own matters, such as other tokens. It opens nobody's sandboxes.
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 4] = [Scope::Read, Scope::Run, Scope::Metrics, Scope::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Run => "run",
            Scope::Metrics => "metrics",
            Scope::Admin => "admin",
        }
    }
}

/// Several of them: `read`, `run,admin`, or `all`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Scopes(Vec<Scope>);

impl Scopes {
    pub fn all() -> Self {
        Self(Scope::ALL.to_vec())
    }

    pub fn iter(&self) -> impl Iterator<Item = Scope> {
        self.0.iter().copied()
    }

    pub fn allow(&self, scope: Scope) -> bool {
        self.0.contains(&scope) || (scope == Scope::Read && self.0.contains(&Scope::Run))
    }

    /// The problem of a token that is not good for `scope`.
    pub fn check(&self, scope: Scope) -> Result<(), Problem> {
        if self.allow(scope) {
            return Ok(());
        }
        let word = format!("this token may not do that: it has the scope `{self}`, not `{}`", scope.as_str());
        Err(Problem::new(Code::Forbidden, word).hint("`carrel token create --scope …` makes one that may"))
    }
}

impl FromStr for Scopes {
    type Err = Problem;
    fn from_str(text: &str) -> Result<Self, Problem> {
        let mut scopes = Vec::new();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            if word == "all" {
                scopes.extend(Scope::ALL);
                continue;
            }
            let known = Scope::ALL.map(Scope::as_str);
            let scope = Scope::ALL.into_iter().find(|scope| scope.as_str() == word).ok_or_else(|| {
                let problem = Problem::new(Code::InvalidArgument, format!("there is no scope `{word}`"));
                match nearest(word, known) {
                    Some(near) => problem.hint(format!("did you mean `{near}`?")),
                    None => problem.hint(format!("all, or some of: {}", known.join(", "))),
                }
            })?;
            scopes.push(scope);
        }
        if scopes.is_empty() {
            return Err(Problem::new(Code::InvalidArgument, "a token needs a scope")
                .hint("all, or some of: read, run, metrics, admin"));
        }
        scopes.sort_unstable();
        scopes.dedup();
        Ok(Self(scopes))
    }
}

impl fmt::Display for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() == Scope::ALL.len() {
            return f.write_str("all");
        }
        f.write_str(&self.0.iter().map(|scope| scope.as_str()).collect::<Vec<_>>().join(","))
    }
}

/// What is known of a token. The secret is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub id: TokenId,
    pub name: String,
    pub scopes: Scopes,
    pub quota: Quota,
    pub created_unix_ms: u64,
    pub expires_unix_ms: Option<u64>,
    pub revoked_unix_ms: Option<u64>,
    /// To a minute.
    pub used_unix_ms: Option<u64>,
}

impl Token {
    pub fn tenant(&self) -> Tenant {
        Tenant::token(&self.id)
    }

    /// Neither expired nor revoked.
    pub fn is_good(&self) -> bool {
        self.revoked_unix_ms.is_none() && self.expires_unix_ms.is_none_or(|end| end > now_ms())
    }
}

/// A token that shall be made.
#[derive(Debug, Clone, Default)]
pub struct NewToken {
    pub name: String,
    pub scopes: Scopes,
    pub quota: Quota,
    pub expires_in: Option<std::time::Duration>,
}

/// Lower-case letters and digits that are not mistaken for one another.
const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// Random text of at least `bytes` random bytes, five bits to a letter.
pub(crate) fn random_text(bytes: usize) -> Result<String, Problem> {
    let mut letters = vec![0_u8; (bytes * 8).div_ceil(5)];
    let mut filled = 0;
    while filled < letters.len() {
        filled += rustix::rand::getrandom(&mut letters[filled..], rustix::rand::GetRandomFlags::empty())
            .map_err(Problem::internal)?;
    }
    // 256 is a multiple of 32, so every letter is equally likely.
    Ok(letters.into_iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect())
}

pub(crate) fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn refused() -> Problem {
    Problem::new(Code::Unauthorized, "the token is not valid")
        .hint("it may be mistyped, expired or revoked; `carrel token list` shows which there are")
}

const COLUMNS: &str = "id, name, scopes, quota, created_ms, expires_ms, revoked_ms, used_ms";

fn token(row: &Row<'_>) -> rusqlite::Result<Token> {
    let bad = |problem: Problem| rusqlite::Error::ToSqlConversionFailure(problem.message.into());
    let time = |at: usize| Ok::<_, rusqlite::Error>(row.get::<_, Option<i64>>(at)?.map(i64::unsigned_abs));
    Ok(Token {
        id: row.get::<_, String>(0)?.parse().map_err(bad)?,
        name: row.get(1)?,
        scopes: row.get::<_, String>(2)?.parse().map_err(bad)?,
        quota: row.get::<_, String>(3)?.parse().map_err(bad)?,
        created_unix_ms: time(4)?.unwrap_or_default(),
        expires_unix_ms: time(5)?,
        revoked_unix_ms: time(6)?,
        used_unix_ms: time(7)?,
    })
}

impl Registry {
    fn add_token(&self, new: &NewToken) -> Result<(Token, String), Problem> {
        let name = new.name.trim();
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return Err(Problem::new(
                Code::InvalidArgument,
                format!("a token's name has 1 to {MAX_NAME} bytes and no control characters"),
            ));
        }
        if new.scopes.0.is_empty() {
            return Err(Problem::new(Code::InvalidArgument, "a token needs a scope"));
        }
        let id = TokenId(format!("tok_{}", random_text(10)?));
        let secret = random_text(SECRET_BYTES)?;
        let now = now_ms();
        let expires = new.expires_in.map(|time| {
            now.saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
                .min(i64::MAX.unsigned_abs())
        });
        let made = Token {
            id,
            name: name.to_owned(),
            scopes: new.scopes.clone(),
            quota: new.quota,
            created_unix_ms: now,
            expires_unix_ms: expires,
            revoked_unix_ms: None,
            used_unix_ms: None,
        };
        self.write(|transaction| {
            transaction
                .execute(
                    "INSERT INTO tokens (id, name, digest, scopes, quota, created_ms, expires_ms)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                    params![
                        made.id.as_str(),
                        made.name,
                        digest(secret.as_bytes()),
                        made.scopes.to_string(),
                        made.quota.to_string(),
                        signed(now),
                        expires.map(signed)
                    ],
                )
                .map_err(failed)
        })?;
        let text = format!("{PREFIX}{}_{secret}", made.id);
        Ok((made, text))
    }

    /// The token of this text, if it is good now.
    fn check_token(&self, text: &str) -> Result<Token, Problem> {
        let text = Some(text).filter(|text| text.len() <= MAX_TEXT).unwrap_or_default();
        let parts = text.strip_prefix(PREFIX).and_then(|rest| rest.rsplit_once('_'));
        let (id, secret) = parts.ok_or_else(refused)?;
        let sql = format!("SELECT {COLUMNS}, digest FROM tokens WHERE id = ?1");
        let found = self.read(|connection| {
            connection
                .prepare_cached(&sql)?
                .query_row([id], |row| Ok((token(row)?, row.get::<_, Vec<u8>>(8)?)))
                .optional()
        })?;
        // Compared in any case, so that an unknown id takes no less time than a wrong secret.
        let (known, wanted) = found.unzip();
        let wanted = wanted.unwrap_or_else(|| vec![0; 32]);
        let same = bool::from(digest(secret.as_bytes()).ct_eq(wanted.as_slice()));
        known.filter(|token| same && token.is_good()).ok_or_else(refused)
    }

    fn is_good(&self, id: &TokenId) -> Result<bool, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM tokens WHERE id = ?1");
        let found = self
            .read(|connection| connection.prepare_cached(&sql)?.query_row([id.as_str()], token).optional())?;
        Ok(found.is_some_and(|token| token.is_good()))
    }

    fn touch_token(&self, id: &TokenId) -> Result<(), Problem> {
        self.write(|transaction| {
            transaction
                .execute(
                    "UPDATE tokens SET used_ms = ?2 WHERE id = ?1",
                    params![id.as_str(), signed(now_ms())],
                )
                .map_err(failed)?;
            Ok(())
        })
    }

    fn tokens(&self) -> Result<Vec<Token>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM tokens ORDER BY created_ms, id");
        self.read(|connection| connection.prepare_cached(&sql)?.query_map([], token)?.collect())
    }

    fn revoke(&self, id: &TokenId) -> Result<Token, Problem> {
        self.write(|transaction| {
            transaction
                .execute(
                    "UPDATE tokens SET revoked_ms = COALESCE(revoked_ms, ?2) WHERE id = ?1",
                    params![id.as_str(), signed(now_ms())],
                )
                .map_err(failed)?;
            let sql = format!("SELECT {COLUMNS} FROM tokens WHERE id = ?1");
            transaction.query_row(&sql, [id.as_str()], token).optional().map_err(failed)?.ok_or_else(|| {
                Problem::new(Code::NotFound, format!("there is no token `{id}`"))
                    .hint("`carrel token list` shows them")
            })
        })
    }
}

impl Engine {
    /// A new token and its text, which nobody can be told again.
    pub fn create_token(&self, new: &NewToken) -> Result<(Token, String), Problem> {
        self.registry.add_token(new)
    }

    /// All tokens, revoked and expired ones too, oldest first.
    pub fn tokens(&self) -> Result<Vec<Token>, Problem> {
        self.registry.tokens()
    }

    /// From now on the token is refused. Its sandboxes stay until they are closed or their time is over.
    pub fn revoke_token(&self, id: &TokenId) -> Result<Token, Problem> {
        self.registry.revoke(id)
    }

    /// Whether what a token of this id was let in for may go on.
    pub fn is_good_token(&self, id: &TokenId) -> Result<bool, Problem> {
        self.registry.is_good(id)
    }

    /// Whose token this is; `unauthorized` unless it is good.
    pub async fn verify_token(&self, text: &str) -> Result<Token, Problem> {
        let token = self.registry.check_token(text)?;
        if token.used_unix_ms.is_none_or(|used| now_ms().abs_diff(used) >= TOUCH_MS) {
            let id = token.id.clone();
            self.blocking(move |engine| engine.registry.touch_token(&id)).await?;
        }
        Ok(token)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn registry() -> (tempfile::TempDir, Registry) {
        let place = tempfile::tempdir().unwrap();
        let registry = Registry::open(&place.path().join("registry.db")).unwrap();
        (place, registry)
    }

    fn new() -> NewToken {
        let quota = "sandboxes=2,rate=5".parse().unwrap();
        NewToken { name: "ci".into(), scopes: Scopes::all(), quota, expires_in: None }
    }

    #[test]
    fn a_token_is_verified_by_its_secret_alone() {
        let (place, registry) = registry();
        let (made, text) = registry.add_token(&new()).unwrap();
        let (other, others_text) = registry.add_token(&new()).unwrap();
        assert_eq!(registry.check_token(&text).unwrap(), made);
        assert_eq!(registry.tokens().unwrap().len(), 2);
        let secret = text.rsplit_once('_').unwrap().1;
        assert!(secret.len() >= 52, "256 bits");
        let long = format!("{text}{}", "x".repeat(1000));
        let swapped = format!("carrel_{}_{}", other.id, secret);
        let wrong =
            ["", "carrel_", "carrel__", "x", &text[..text.len() - 1], &text.to_uppercase(), &long, &swapped];
        let words: Vec<Problem> = wrong.iter().map(|text| registry.check_token(text).unwrap_err()).collect();
        assert!(words.iter().all(|problem| *problem == refused() && problem.code == Code::Unauthorized));
        drop(registry);
        // Nothing on disk says the secret.
        for file in std::fs::read_dir(place.path()).unwrap() {
            let bytes = std::fs::read(file.unwrap().path()).unwrap();
            for secret in [secret, others_text.rsplit_once('_').unwrap().1] {
                assert!(!bytes.windows(secret.len()).any(|window| window == secret.as_bytes()));
            }
        }
    }

    #[test]
    fn expired_and_revoked_tokens_are_refused_like_unknown_ones() {
        let (_place, registry) = registry();
        let (made, text) = registry.add_token(&new()).unwrap();
        assert!(registry.is_good(&made.id).unwrap());
        assert!(registry.revoke(&made.id).unwrap().revoked_unix_ms.is_some());
        assert!(!registry.is_good(&made.id).unwrap());
        assert_eq!(registry.check_token(&text).unwrap_err(), refused());
        let (made, text) =
            registry.add_token(&NewToken { expires_in: Some(Duration::ZERO), ..new() }).unwrap();
        assert!(!registry.is_good(&made.id).unwrap());
        assert_eq!(registry.check_token(&text).unwrap_err(), refused());
        let (_, text) = registry.add_token(&NewToken { expires_in: Some(Duration::MAX), ..new() }).unwrap();
        assert!(registry.check_token(&text).is_ok());
        let unknown: TokenId = "tok_aaaaaaaaaaaaaaaa".parse().unwrap();
        assert_eq!(registry.revoke(&unknown).unwrap_err().code, Code::NotFound);
        assert!(!registry.is_good(&unknown).unwrap());
    }

    #[test]
    fn scopes_are_read_and_printed() {
        assert_eq!("all".parse::<Scopes>().unwrap().to_string(), "all");
        let run: Scopes = "run".parse().unwrap();
        assert!(run.allow(Scope::Read) && run.allow(Scope::Run) && !run.allow(Scope::Admin));
        let read: Scopes = "read, read".parse().unwrap();
        assert_eq!(read.to_string(), "read");
        assert_eq!(read.check(Scope::Run).unwrap_err().code, Code::Forbidden);
        assert_eq!("reed".parse::<Scopes>().unwrap_err().hint, "did you mean `read`?");
        assert!("".parse::<Scopes>().is_err() && "run,root".parse::<Scopes>().is_err());
    }

    #[test]
    fn a_token_needs_a_name_and_a_scope() {
        let (_place, registry) = registry();
        for bad in [
            NewToken { name: " ".into(), ..new() },
            NewToken { name: "x".repeat(101), ..new() },
            NewToken { name: "a\nb".into(), ..new() },
            NewToken { scopes: Scopes::default(), ..new() },
        ] {
            assert_eq!(registry.add_token(&bad).unwrap_err().code, Code::InvalidArgument);
        }
        assert!("tok_x/../..".parse::<TokenId>().is_err());
    }
}
