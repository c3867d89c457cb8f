//! What is asked of a PostgreSQL over its own protocol.

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection};

const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const CREATE_WITHIN: Duration = Duration::from_secs(30);

/// Whether `SELECT 1` is answered in time. An open port is no readiness: a server in recovery refuses queries.
pub(super) async fn answers(url: &str) -> Result<(), String> {
    let ask = async {
        let mut connection = connect(url).await?;
        let one: i32 = sqlx::query_scalar("SELECT 1")
            .fetch_one(&mut connection)
            .await?;
        connection.close().await?;
        Ok::<_, sqlx::Error>(one)
    };
    match tokio::time::timeout(ANSWER_WITHIN, ask).await {
        Ok(Ok(1)) => Ok(()),
        Ok(Ok(other)) => Err(format!("SELECT 1 answered {other}")),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {ANSWER_WITHIN:?}")),
    }
}

/// Creates a database. The name must need no quoting, as those of `unique_name` do.
pub(super) async fn create(url: &str, name: &str) -> Result<(), String> {
    let create = async {
        let mut connection = connect(url).await?;
        let statement = format!("CREATE DATABASE {name}");
        connection.execute(AssertSqlSafe(statement)).await?;
        connection.close().await
    };
    match tokio::time::timeout(CREATE_WITHIN, create).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {CREATE_WITHIN:?}")),
    }
}

async fn connect(url: &str) -> Result<PgConnection, sqlx::Error> {
    let options: PgConnectOptions = url.parse()?;
    options.disable_statement_logging().connect().await
}

/// The same URL for another database; user, password and parameters stay.
pub(super) fn with_database(url: &str, name: &str) -> String {
    let authority = url.find("://").map_or(0, |scheme| scheme + 3);
    let (server, query) = match url.find('?') {
        Some(query) => url.split_at(query),
        None => (url, ""),
    };
    let server = match server[authority..].find('/') {
        Some(path) => &server[..authority + path],
        None => server,
    };
    format!("{server}/{name}{query}")
}

#[cfg(test)]
mod tests {
    use super::with_database;

    #[test]
    fn only_the_database_of_a_url_changes() {
        for (url, expected) in [
            ("postgres://u:p@h:1/old", "postgres://u:p@h:1/new"),
            ("postgres://h", "postgres://h/new"),
            ("postgres://h/", "postgres://h/new"),
            (
                "postgres://h/old?sslmode=disable&options=-c%20a=/b",
                "postgres://h/new?sslmode=disable&options=-c%20a=/b",
            ),
            ("postgres://h?host=/run/pg", "postgres://h/new?host=/run/pg"),
        ] {
            assert_eq!(with_database(url, "new"), expected);
        }
    }
}
